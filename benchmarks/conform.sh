#!/usr/bin/env bash
# Asks every target of `kvcustody known-bugs` again, each in the environment of its product (made on first use), runs the
# conformance kit over our engines, keeps the records in benchmarks/results/conform/ and conformance-kit/, and makes
# docs/reference/measurements/other-systems.md of them.
#   benchmarks/conform.sh [TARGET... | --kit]
set -euo pipefail
cd "$(dirname "$0")/.."

RECORDS=benchmarks/results/conform
KIT=benchmarks/results/conformance-kit
TARGETS=("$@")

kit() { # NAME ENVIRONMENT ENGINE [--subject CLASS --record FILE]
  local name=$1 environment=$2 engine=$3
  shift 3
  "$environment/bin/kvcustody" conformance --engine "$engine" --json "$@" >"$KIT/$name.json.part"
  mv "$KIT/$name.json.part" "$KIT/$name.json"
}
if [ $# = 0 ] || [ "$1" = --kit ]; then
  TARGETS=()
  mkdir -p "$KIT/records"
  kit reference .venv kvcustody.testkit.conformance.engines.reference_engine:ReferenceEngine
  kit transformers .venv kvcustody.testkit.transformers.conformance:engine
  kit vllm "$(benchmarks/vllm_env.sh)" kvcustody.testkit.vllm.conformance:engine
  lmcache=$(benchmarks/lmcache_env.sh)
  kit lmcache "$lmcache" kvcustody.testkit.lmcache.conformance:engine \
    --subject vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector \
    --record "$KIT/records/LMCacheMPConnector.json"
  kit lmcache-serde "$lmcache" kvcustody.testkit.lmcache.conformance:engine_with_serde
fi
if [ $# = 0 ]; then
  mapfile -t TARGETS < <(.venv/bin/python -c 'from kvcustody.testkit.conform.public_cases import TARGETS
for target in TARGETS: print(target.name)')
fi
for target in "${TARGETS[@]}"; do
  record=$RECORDS/$target.json
  case $target in
    kvcustody*) record=$RECORDS/ours/$target.json ;;
    dynamo*) record=$RECORDS/dynamo/$target.json ;;
  esac
  case $target in
    kvcustody | kvcustody-door | kvcustody-events) environment=.venv ;;
    kvcustody-router) environment=.venv PATH=$PWD/$(benchmarks/routers_env.sh smg)/bin:$PATH ;;
    smg | vllm-router) environment=$(benchmarks/routers_env.sh "$target") ;;
    kvcustody-hicache) environment=$(benchmarks/sglang_env.sh) ;;
    kvcustody-dynamo) environment=$(benchmarks/dynamo_env.sh) ;;
    kvcustody-lmcache*) environment=$(benchmarks/lmcache_env.sh) ;;
    *) environment=$("benchmarks/${target%%-*}_env.sh") ;;
  esac
  status=0
  .venv/bin/kvcustody known-bugs --target "$target" --python "$environment/bin/python" --out "$record" || status=$?
  [ "$status" -le 1 ] || exit "$status" # 1: found, which is a result
done
.venv/bin/python -m kvcustody.testkit.conform.comparison "$RECORDS" "$KIT" docs/reference/measurements/other-systems.md
