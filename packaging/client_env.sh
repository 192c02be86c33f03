#!/usr/bin/env bash
# Makes the environment of openapi-python-client on first use (60 MB) and prints its folder. It pins an older typer than
# ours, so it has one of its own. Where it cannot be installed this fails and says so.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=0.29.0
VENV=.venv-client
READY=$VENV/.ready-$VERSION
if [ ! -e "$READY" ]; then
  echo "installing openapi-python-client $VERSION into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  if ! "$VENV/bin/python" -m pip --quiet --disable-pip-version-check install "openapi-python-client==$VERSION" >&2; then
    echo "ERROR: openapi-python-client $VERSION cannot be installed: no client is made from the API document" >&2
    exit 69 # EX_UNAVAILABLE
  fi
  touch "$READY"
fi
echo "$VENV"
