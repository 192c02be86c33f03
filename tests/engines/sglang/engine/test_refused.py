"""What is not governed does not start, and the message names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.integrations.sglang.check_engine import (
    REFUSED,
    check_hooks,
    check_options,
    check_server,
    check_version,
)


class Arguments:
    """SGLang's options as they stand for a governed engine."""

    tp_size = pp_size = dp_size = 1
    disable_overlap_schedule = True
    disaggregation_mode = "null"


def test_the_options_of_a_governed_engine_pass():
    check_options(Arguments())
    check_version()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tp_size", 2),
        ("dp_size", 2),
        ("disable_overlap_schedule", False),
        ("disaggregation_mode", "decode"),
        ("speculative_algorithm", "EAGLE"),
        ("enable_lora", True),
        ("lora_paths", ["adapter"]),
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_streaming_session", True),
        ("enable_memory_saver", True),
        ("kv_events_config", "{}"),
        ("tokenizer_worker_num", 2),
        ("disable_radix_cache", True),
        ("grpc_port", 50_051),
        ("smg_grpc_mode", True),
        ("grpc_mode", True),
    ],
)
def test_an_option_that_is_not_governed_is_named(option, value):
    arguments = Arguments()
    setattr(arguments, option, value)
    with pytest.raises(ConfigError, match=rf"`{option}`.*; (leave it out|set it to `[\w]+`)$"):
        check_options(arguments)


def test_the_rust_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="bypass the door"):
        check_options(Arguments())
    monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
    check_options(Arguments())


def test_a_server_that_would_ask_itself_without_identity_is_refused():
    arguments = Arguments()
    arguments.skip_server_warmup = False
    with pytest.raises(ConfigError, match="start it with `--skip-server-warmup`"):
        check_server(arguments)
    arguments.skip_server_warmup = True
    check_server(arguments)


def test_every_refused_option_is_one_of_sglangs():
    """A misspelt one would be refused never."""
    from sglang.srt import arg_groups

    fields = Path(arg_groups.__path__[0]) / "fields"
    declared = "".join(path.read_text() for path in fields.glob("*.py"))
    missing = [one.option for one in REFUSED if re.search(rf"^ +{one.option}: ", declared, re.M) is None]
    assert missing == []


def test_a_hook_that_did_not_take_is_named():
    with pytest.raises(ConfigError, match="run_batch"):
        check_hooks(["a.Scheduler.run_batch", "a.Scheduler.on_idle"], ["a.Scheduler.on_idle"])
