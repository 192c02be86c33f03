"""Priorities and durations from policy to the engine, from a request narrowed to policy, and back to our pools' words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_engine import KvCacheRetentionConfig, modules, uninstall

from kvcustody.errors import ConfigError
from kvcustody.integrations.tensorrt_llm.retention import (
    DEFAULT,
    RangeRetention,
    Retention,
    block_priorities_of,
    narrowed,
    read_retention,
    retention_of,
    to_engine,
)
from kvcustody.policies.reading.load import parse_policy

POLICY = """\
schema: kvcustody/policy@1
name: retention
profile: shared
scope: tenant
classifications: [internal, restricted]
classify: [{tenant: "*", as: internal}, {tenant: secret, as: restricted}]
tenants:
  secret: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: reuse, when: {reader: owner}}
retention:
  internal:   {idle: 10m, absolute: 1h, active_max: 1h}
  restricted: {idle: 0s, absolute: 0s, active_max: 1m}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: priority, priority: 40, ranges: [{from: 0, to: 64, priority: 90, for: 30s}, {from: 64, to: 100, priority: 10, for: 2h}]}
"""
