#!/usr/bin/env bash
# The vLLM suites in the environment of one release, made on first use: run.sh [--version 0.32.0] [pytest arguments]
# Without pytest arguments vLLM's own tests run over our classes too.
set -euo pipefail
cd "$(dirname "$0")/../.."

VERSION=0.32.0
if [ "${1:-}" = --version ]; then
  VERSION=$2
  shift 2
fi
VENV=$(benchmarks/vllm_env.sh "$VERSION")
unset PYTHONDONTWRITEBYTECODE # an engine is three processes, and each would compile vLLM again

if [ $# -gt 0 ]; then
  exec "$VENV/bin/python" -m pytest -q "$@"
fi
"$VENV/bin/python" -m pytest -q tests/engines/vllm
"$VENV/bin/python" tests/engines/vllm/own_suite.py
[ "$VERSION" != 0.32.0 ] || "$VENV/bin/python" tests/engines/vllm/own_suite.py --version 0.33.0
