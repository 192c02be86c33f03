#!/usr/bin/env bash
# LMCache's own classes, its server, and vLLM through it, in an environment of their own (made on first use, 3.6 GB):
# run.sh [--version 0.5.6] [pytest arguments]. Skipped, and it says so, only where it cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../../.."

made=0 VERSION=()
if [ "${1:-}" = --version ]; then
  VERSION=("$2")
  shift 2
fi
VENV=$(benchmarks/lmcache_env.sh "${VERSION[@]}") || made=$?
if [ "$made" = 69 ]; then # EX_UNAVAILABLE
  echo "SKIPPED: LMCache cannot be installed here; none of its suites has run" >&2
  exit 0
fi
[ "$made" = 0 ] || exit "$made"
unset PYTHONDONTWRITEBYTECODE
exec "$VENV/bin/python" -m pytest -q "${@:-tests/engines/lmcache}"
