#!/usr/bin/env bash
# Against Dynamo's own parts, in an environment of their own (made on first use, 0.4 GB): run.sh [pytest arguments].
# Skipped, and it says so, only where they cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../../.."

made=0
VENV=$(benchmarks/dynamo_env.sh) || made=$?
if [ "$made" = 69 ]; then # EX_UNAVAILABLE
  echo "SKIPPED: Dynamo cannot be installed here; none of its suites has run" >&2
  exit 0
fi
[ "$made" = 0 ] || exit "$made"
exec "$VENV/bin/python" -m pytest -q "${@:-tests/engines/dynamo}"
