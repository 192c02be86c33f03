#!/usr/bin/env bash
# The validation of a GPU in one command, in stages: benchmarks/gpu.sh --json OUT (see --help and --list).
# It needs a Python with torch, triton, numpy and pytest; nothing is downloaded. What is missing is a SKIP with its reason.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m gpu "$@"
