#!/bin/sh
# What a pipeline runs on a change of a policy; the base install is enough. It stops at the first that does not hold.
#   sh check.sh
set -eu
cd "$(dirname "$0")"
kvcustody policy validate policy.yaml
kvcustody policy fmt --check policy.yaml
kvcustody policy test policy.yaml cases.yaml
kvcustody policy prove policy.yaml
kvcustody policy check-no-new-access before.yaml policy.yaml # against what is in effect
