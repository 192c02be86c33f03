#!/usr/bin/env bash
# Makes the environment of one SGLang release on a machine without a GPU, on first use (3 GB), and prints its folder:
# sglang_env.sh [VERSION]. Exits 69 where pip cannot install that release.
# SGLang has no build for the CPU: its Python code runs with torch's CPU build, without its CUDA packages, which
# tests/engines/sglang/inert stands in for.
set -euo pipefail
cd "$(dirname "$0")/.."

DEFAULT=0.5.23
VERSION=${1:-$DEFAULT}
VENV=.venv-sglang
[ "$VERSION" = "$DEFAULT" ] || VENV=.venv-sglang-$VERSION
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
READY=$VENV/.ready

if [ ! -e "$READY" ] || [ pyproject.toml -nt "$READY" ] || [ constraints.txt -nt "$READY" ]; then
  echo "installing sglang $VERSION and kvcustody into $VENV" >&2
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" >&2
  if [ ! -e "$VENV/theirs.txt" ]; then
    # pip must be configured with an index that carries the CPU build of torch.
    "${PIP[@]}" install torch==2.13.0 numpy >&2 || exit 69 # EX_UNAVAILABLE
    "${PIP[@]}" install --no-deps "sglang==$VERSION" >&2 || exit 69
    "${PIP[@]}" install aiohttp anthropic blobfile compressed-tensors==0.18.0 distro easydict einops fastapi gguf \
      interegular IPython jsonschema 'llguidance>=1.7.6,<2' msgspec ninja numba==0.65.1 nvidia-ml-py openai==2.8.0 \
      openai-harmony==0.0.4 orjson packaging parameterized partial_json_parser pillow prometheus-client psutil pybase64 \
      pydantic python-dateutil python-multipart pyzmq regex requests scipy sentencepiece==0.2.1 setproctitle tiktoken \
      tokenizers==0.23.2 tqdm transformers==5.19.0 uvicorn uvloop watchfiles xxhash zstandard >&2 || exit 69
    # These name CUDA packages, or versions of others, that nothing here needs.
    "${PIP[@]}" install --no-deps apache-tvm-ffi==0.1.11 cffi dill outlines==0.1.11 triton==3.9.0 xgrammar==0.2.7 >&2 || exit 69
    "$VENV/bin/python" -m pip freeze --exclude-editable 2>/dev/null | grep -viE '^kvcustody|@' >"$VENV/theirs.txt"
  fi
  # kvcustody joins SGLang's environment: whatever SGLang chose stays as it is; the rest is ours, pinned.
  theirs=$(sed -E 's/==.*//' "$VENV/theirs.txt" | tr 'A-Z_.' 'a-z--')
  while read -r pin; do
    name=$(echo "${pin%%==*}" | tr 'A-Z_.' 'a-z--')
    grep -qx "$name" <<<"$theirs" || echo "$pin"
  done < <(grep -E '^[A-Za-z0-9]' constraints.txt) >"$VENV/constraints.txt"
  cat "$VENV/theirs.txt" >>"$VENV/constraints.txt"
  "${PIP[@]}" install --constraint "$VENV/constraints.txt" --editable '.[sglang]' --editable packaging/testkit pytest >&2
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\nimport inert_modules\n' "$PWD/tests/engines/sglang/inert" >"$site/inert_modules.pth"
  touch "$READY"
fi
echo "$VENV"
