"""A denied grant costs what an absent block costs: its chain is searched with a key that keys nothing."""

import importlib.util
import sys
from pathlib import Path

from kvcustody.governance.decisions.reuse_decision import Moment
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.request import read_prompt

_spec = importlib.util.spec_from_file_location("activation_world", Path(__file__).with_name("test_activation.py"))
assert _spec is not None and _spec.loader is not None
activation = importlib.util.module_from_spec(_spec)
sys.modules["activation_world"] = activation
_spec.loader.exec_module(activation)


def read(world, plan):
    prompt = read_prompt(activation.PROMPT, 16, None, keep_last=True)
    governor = world.governor
    moment = Moment(world.clock.now_us(), world.clock.utc_us())
    read_plan, _ = governor._reuse.read_plan(plan, prompt, governor._counters("reader"), moment)
    return read_plan, governor.managers[0].match_prefix(read_plan, prompt, moment.now_us)


def reader_plan(world):
    key = (identify(issuer="idp", tenant="reader"), activation.MODEL.digest, None, None, None, None)
    plan = world.governor._book.plan(key, world.clock.utc_us())
    assert plan is not None and len(plan.grants) == 1
    return plan


def test_a_grant_that_may_not_be_used_is_searched_under_a_decoy(tmp_path: Path) -> None:
    world = activation.World(tmp_path)
    world.hit("holder")
    plan = reader_plan(world)
    denied, searched = read(world, plan)  # its first use is not on record yet
    assert [chain.state for chain in denied.grants] == [plan.decoy]
    assert searched.hit_blocks == 0
    world.governor.settle()
    permitted, searched = read(world, plan)
    assert [chain.state for chain in permitted.grants] == [plan.grants[0].chain.state]
    assert searched.hit_blocks == 4  # the control: the block is there, and only the key was missing
    assert plan.decoy.digest() != plan.grants[0].chain.state.digest()
