#!/usr/bin/env bash
# Governed against ungoverned: makes .venv-vllm on first use (3.5 GB), then runs compare.py with any further arguments.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$(benchmarks/vllm_env.sh)
exec "$VENV/bin/python" benchmarks/compare.py "$@"
