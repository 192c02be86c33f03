#!/usr/bin/env bash
# The suites beside one release of transformers, which lies in a folder of its own in front of the environment of
# `make setup`: run.sh VERSION [pytest arguments]. Skipped, and it says so, only where pip cannot install it.
set -euo pipefail
cd "$(dirname "$0")/../../.."

VERSION=$1
shift
FOLDER=.releases/transformers-$VERSION
if [ ! -e "$FOLDER/.ready" ]; then
  .venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps --target "$FOLDER" "transformers==$VERSION" >&2 || {
    echo "SKIPPED: transformers $VERSION cannot be installed here" >&2
    exit 0
  }
  touch "$FOLDER/.ready"
fi
PYTHONPATH="$PWD/$FOLDER" exec .venv/bin/python -m pytest -q -m "not soak" "${@:-tests/engines/transformers}"
