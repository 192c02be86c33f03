#!/usr/bin/env bash
# Everything that needs a GPU, in one command: tests, sanitizers, bandwidth, and the cost to a serving engine.
#
#     benchmarks/gpu.sh [FOLDER]          result files go to FOLDER (default: benchmarks/results)
#
# It needs a Python with torch, triton, numpy, pytest and hypothesis; `transformers` in the adapter's range adds the
# serving cost. Nothing is downloaded; what is missing is named and left out, and the exit status counts what failed.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
RESULTS=${1:-benchmarks/results}
mkdir -p "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
failed=0

part() { # part NAME COMMAND...: run it, keep its output, count a failure
    local name=$1
    shift
    echo "== $name"
    if ! "$@" 2>&1 | tee "$RESULTS/$name.log"; then
        echo "== $name FAILED"
        failed=$((failed + 1))
    fi
}
has() { "$PYTHON" -c "import $1" 2>/dev/null; }

"$PYTHON" - <<'CHECK' || exit 1
import torch
assert torch.cuda.is_available(), "no CUDA or ROCm device is visible"
print(torch.cuda.get_device_name(), "torch", torch.__version__)
CHECK

PYTEST="$PYTHON -m pytest -q -p no:cacheprovider --noconftest"
part gpu-tests $PYTEST -m gpu tests/kernels/test_gpu.py
part gpu-kernels env KVCUSTODY_TEST_DEVICE=cuda $PYTEST tests/kernels/test_kernels.py
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        part "gpu-$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" benchmarks/device/sanitize.py
    done
else
    echo "== compute-sanitizer is not installed: memcheck and racecheck left out"
fi
part gpu-scrub "$PYTHON" benchmarks/device/scrub.py --device cuda --mib 1024 --full --json "$RESULTS/scrub-cuda.json"
part gpu-residue "$PYTHON" benchmarks/device/residue.py --device cuda --mib 2048 --json "$RESULTS/residue-cuda.json"
if has transformers; then
    part gpu-serving "$PYTHON" benchmarks/engines/serving_cost.py --device cuda --shape llama-8b \
        --json "$RESULTS/serving-cuda.json"
else
    echo "== transformers is not installed: the cost to serving left out"
fi
if has transformers && has sqlalchemy && has cryptography; then
    part gpu-transformers "$PYTHON" benchmarks/engines/transformers_cost.py --device cuda --shape llama-8b --pairs 15 \
        --json "$RESULTS/transformers-cuda.json"
else
    echo "== the governed engine needs kvcustody's own dependencies: tokens/s governed / plain left out"
fi
echo "$failed parts failed"
exit "$failed"
