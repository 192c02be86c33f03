#!/usr/bin/env bash
# Makes the environment of Mooncake's store on first use (0.4 GB) and prints its folder. Exits 69 where pip cannot
# install it, or the system has no libibverbs, librdmacm, libnuma and libcurl.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.3.13.post1
VENV=${ENGINE_VENV:-.venv-mooncake}
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready
if [ ! -e "$READY" ] || [ pyproject.toml -nt "$READY" ] || [ constraints.txt -nt "$READY" ]; then
  echo "installing mooncake-transfer-engine-non-cuda $VERSION and kvcustody into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  "${PIP[@]}" install --no-deps "mooncake-transfer-engine-non-cuda==$VERSION" >&2 || exit 69 # EX_UNAVAILABLE
  "${PIP[@]}" install --editable '.[events]' pytest >&2
  touch "$READY"
fi
if ! "$VENV/bin/python" -c 'import mooncake.store' 2>/dev/null; then
  echo "mooncake.store does not load: install libibverbs1 librdmacm1 libnuma1 libcurl4" >&2
  exit 69
fi
echo "$VENV"
