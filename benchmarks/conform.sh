#!/usr/bin/env bash
# Asks every target of `kvcustody conform` again, each in the environment of its product (made on first use), runs the
# conformance kit over our engines, keeps the records in benchmarks/results/conform/ and conformance-kit/, and makes
# docs/start/other-systems.md of them.
#   benchmarks/conform.sh [TARGET... | --kit]
set -euo pipefail
cd "$(dirname "$0")/.."

RECORDS=benchmarks/results/conform
KIT=benchmarks/results/conformance-kit
TARGETS=("$@")

kit() { # NAME ENVIRONMENT ENGINE
  "$2/bin/kvcustody" conformance --engine "$3" --json >"$KIT/$1.json.part"
  mv "$KIT/$1.json.part" "$KIT/$1.json"
}
if [ $# = 0 ] || [ "$1" = --kit ]; then
  TARGETS=()
  mkdir -p "$KIT"
  kit reference .venv kvcustody.testkit.conformance.engines.reference_engine:ReferenceEngine
  kit transformers .venv kvcustody.testkit.transformers.conformance:engine
  kit vllm "$(benchmarks/vllm_env.sh)" kvcustody.testkit.vllm.conformance:engine
fi
if [ $# = 0 ]; then
  mapfile -t TARGETS < <(.venv/bin/python -c 'from kvcustody.testkit.conform.public_cases import TARGETS
for target in TARGETS: print(target.name)')
fi
for target in "${TARGETS[@]}"; do
  record=$RECORDS/$target.json
  case $target in kvcustody*) record=$RECORDS/ours/$target.json ;; esac
  case $target in
    kvcustody | kvcustody-door | kvcustody-events) environment=.venv ;;
    kvcustody-hicache) environment=$(benchmarks/sglang_env.sh) ;;
    kvcustody-dynamo) environment=$(benchmarks/dynamo_env.sh) ;;
    kvcustody-lmcache*) environment=$(benchmarks/lmcache_env.sh) ;;
    *) environment=$("benchmarks/${target%%-*}_env.sh") ;;
  esac
  status=0
  .venv/bin/kvcustody conform --target "$target" --python "$environment/bin/python" --out "$record" || status=$?
  [ "$status" -le 1 ] || exit "$status" # 1: found, which is a result
done
.venv/bin/python -m kvcustody.testkit.conform.comparison "$RECORDS" "$KIT" docs/start/other-systems.md
