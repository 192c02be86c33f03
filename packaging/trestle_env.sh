#!/usr/bin/env bash
# Makes the environment of compliance-trestle on first use (90 MB) and prints its folder. Trestle pins what we do not, so
# it has one of its own. Where it cannot be installed this fails and says so: OSCAL is not unchecked in silence.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=5.2.0
VENV=.venv-trestle
READY=$VENV/.ready-$VERSION
if [ ! -e "$READY" ]; then
  echo "installing compliance-trestle $VERSION into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  if ! "$VENV/bin/python" -m pip --quiet --disable-pip-version-check install "compliance-trestle==$VERSION" >&2; then
    echo "ERROR: compliance-trestle $VERSION cannot be installed: OSCAL documents are not checked by trestle" >&2
    exit 69 # EX_UNAVAILABLE
  fi
  touch "$READY"
fi
echo "$VENV"
