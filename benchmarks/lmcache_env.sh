#!/usr/bin/env bash
# Makes the environment of one LMCache release beside vLLM on first use (3.6 GB) and prints its folder:
# lmcache_env.sh [VERSION]. Exits 69 where pip cannot install either.
set -euo pipefail
cd "$(dirname "$0")/.."

DEFAULT=0.5.6
VERSION=${1:-$DEFAULT}
NAME=.venv-lmcache
[ "$VERSION" = "$DEFAULT" ] || NAME=.venv-lmcache-$VERSION
VENV=$(ENGINE_VENV=$NAME benchmarks/vllm_env.sh)
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
if [ "$("$VENV/bin/python" -m pip show lmcache 2>/dev/null | sed -n 's/^Version: //p')" != "$VERSION" ]; then
  echo "installing lmcache $VERSION into $VENV" >&2
  # Its own requirements ask for CUDA packages; these are what its server and connector import on a CPU.
  "${PIP[@]}" install --no-deps "lmcache==$VERSION" aiofile aiofiles caio nvtx redis sortedcontainers \
    opentelemetry-exporter-prometheus awscrt coverage >&2 || exit 69 # EX_UNAVAILABLE
fi
echo "$VENV"
