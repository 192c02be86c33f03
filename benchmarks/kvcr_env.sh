#!/usr/bin/env bash
# Makes the environment of KVCR on first use (1 GB) and prints its folder. Exits 69 where pip cannot install it.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.1.1
NIXL=1.5.0
VENV=${ENGINE_VENV:-.venv-kvcr}
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready
if [ ! -e "$READY" ]; then
  echo "installing kvcr $VERSION into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  # pip must be configured with an index that carries the CPU build of torch, which NIXL imports.
  "${PIP[@]}" install torch==2.13.0 numpy msgspec 'pyzmq<28' >&2 || exit 69 # EX_UNAVAILABLE
  # Of NIXL's two builds the one for CUDA 12; neither needs CUDA for memory and files of the host.
  "${PIP[@]}" install --no-deps "kvcr==$VERSION" "nixl==$NIXL" "nixl-cu12==$NIXL" >&2 || exit 69
  touch "$READY"
fi
echo "$VENV"
