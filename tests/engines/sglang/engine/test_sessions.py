"""Sessions of SGLang, which keep a request's tokens for whoever names its session: refused, and why."""

from __future__ import annotations

from standins.engines.sglang.sglang_tiers import clean

FIRST = [16 + (7 * at) % 400 for at in range(200)]


def _two_turns(engine, tokens):
    """The first one's turn in a session, and another's who goes on with one token of its own."""
    engine.engine.open_session(10_000, "s")
    return [
        engine.run(prompt, token, rid=rid, session_params=session)
        for prompt, token, rid, session in (
            (FIRST, tokens[0], "turn", {"id": "s"}),
            ([20], tokens[1], "other", {"id": "s", "rid": "turn"}),
        )
    ]


def test_requests_of_a_session_are_refused_and_leave_nothing(start, new_deployment):
    engine = start(deployment=new_deployment())
    site = engine.deployment
    for answer in _two_turns(engine, (site.token("acme"), site.token("beta"))):
        assert answer.tokens == [] and "sessions are not governed" in answer.reason["message"]
    named = engine.run(FIRST, site.token("acme"), session_id="s")
    assert "sessions are not governed" in named.reason["message"]
    assert engine.run(FIRST, site.token("acme")).cached_tokens == 0, "nothing was computed for them"
    assert engine.run(FIRST, site.token("acme")).cached_tokens == len(FIRST) - 1, "a turn finds the one before"
    clean(engine)


def test_in_plain_sglang_another_goes_on_from_what_was_said(start):
    """The control: whoever names the session has the other's tokens before its own."""
    engine = start()
    first, other = _two_turns(engine, ("same", "same"))
    assert len(first.tokens) == 8 and other.cached_tokens >= len(FIRST), "of a prompt of one token"
