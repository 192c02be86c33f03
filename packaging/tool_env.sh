#!/usr/bin/env bash
# Makes the environment of a tool that pins what we do not, on first use, and prints its folder:
#   packaging/tool_env.sh FOLDER PACKAGE VERSION
# Where the tool cannot be installed this fails and says so: nothing is unchecked in silence.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$1 PACKAGE=$2 VERSION=$3
READY=$VENV/.ready-$VERSION
if [ ! -e "$READY" ]; then
  echo "installing $PACKAGE $VERSION into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  if ! "$VENV/bin/python" -m pip --quiet --disable-pip-version-check install "$PACKAGE==$VERSION" >&2; then
    echo "ERROR: $PACKAGE $VERSION cannot be installed: what it checks is not checked" >&2
    exit 69 # EX_UNAVAILABLE
  fi
  touch "$READY"
fi
echo "$VENV"
