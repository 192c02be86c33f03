"""A9 and B5: ids that callers choose collide without effect, and every kind of miss looks like every other."""

from __future__ import annotations

import hashlib
import time
from random import Random
from typing import Any

import numpy as np
import pytest

from kvcustody.errors import HandleError
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.decisions.reuse_decision import ReuseDecider
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.extra_content import Media, frame
from kvcustody.governance.identity.principal import Principal
from standins.redteam.two_worlds import AUC_GATE, BLOCK, MODEL, ROOMY, World, auc, compare, table, tokens

# -- A9 -------------------------------------------------------------------------------------------------------

IDS = 40


def _serve(world: World, random: Random, at: int) -> None:
    """The observed tenant: requests with ids, sessions, salts and media of its own choice, several in flight."""
    name = f"request-{at % IDS}"
    world.governor.release(("attacker", name))
    prompt = tokens(Random(at // 3), 3 * BLOCK + 1)
    image = {0: frame(Media(b"image-%d" % (at // 3 % 7), (1,), "u8"))} if at // 3 % 5 == 0 else None
    answer = world.admit(
        "attacker", prompt, request_id=name, session=f"s{at // 3 % 9}", salt=f"x{at // 3 % 4}", extras=image
    )
    world.observe("attacker", answer, len(prompt))
    if isinstance(answer, Admission):
        world.governor.commit([answer.request_id], [len(prompt)])


def _collide(world: World, random: Random, at: int, unique: str = "") -> None:
    """The other tenant: the very same ids, sessions, salts, media and prompts, and releases of what is not its own."""
    name = f"{unique}request-{(at + random.randrange(3)) % IDS}"
    governor = world.governor
    governor.release(("victim", name))
    prompt = tokens(Random(at // 3), 3 * BLOCK + 1)
    image = {0: frame(Media(b"image-%d" % (at // 3 % 7), (1,), "u8"))} if at // 3 % 5 == 0 else None
    answer = world.admit(
        "victim", prompt, request_id=name, session=f"s{at // 3 % 9}", salt=f"x{at // 3 % 4}", extras=image
    )
    assert isinstance(answer, Admission | AdmissionRefused)
    for call in (governor.abort, governor.preempt):
        call(("victim", f"{unique}request-{at % IDS}"))


def _quiet(world: World, random: Random, at: int) -> None:
    """What the other world's victim does: the same work under ids of its own."""
    _collide(world, random, at, unique="own-")


class _ByRawId(dict[Any, Any]):
    """A control: running requests are found by the caller's id alone."""

    @staticmethod
    def _raw(key: Any) -> Any:
        return key[-1] if isinstance(key, tuple) else key

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._raw(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._raw(key), value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._raw(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._raw(key), default)

    def pop(self, key: Any, default: Any = None) -> Any:
        return super().pop(self._raw(key), default)


def _shared() -> World:
    return World(table(scope="session"), blocks=16_384)


def _by_raw_id() -> World:
    world = _shared()
    world.governor._live = _ByRawId()
    return world


def _check_ids(rounds: int) -> None:
    compared = compare(_shared, _serve, _collide, rounds, other=_quiet)
    assert compared.first is None, compared
    control = compare(_by_raw_id, _serve, _collide, min(rounds, 300), other=_quiet)
    assert control.different >= 1, "void: a raw id as key must misroute"


def test_colliding_ids_have_no_effect() -> None:
    """A9, small: 300 rounds of colliding request ids, sessions, salts and media."""
    _check_ids(300)


@pytest.mark.soak
def test_colliding_ids_at_full_size() -> None:
    """A9, full: 10^5 collisions."""
    _check_ids(100_000)


def test_two_issuers_may_name_a_tenant_alike_and_share_no_block() -> None:
    """A9: a tenant is (issuer, id). Equal ids under two issuers never share content."""
    listed = table(
        tenants=ROOMY.replace("victim:", "victim^one:").replace("attacker:", "attacker^one:"),
        issuers="one, two",
    )
    world = World(listed)
    prompt = list(range(3 * BLOCK))
    hits = []
    for issuer in ("one", "two", "one", "two"):
        answer = world.governor.admit(Principal(issuer, "acme"), MODEL, prompt)  # type: ignore[arg-type]
        world.finish(answer, len(prompt))
        hits.append(answer.hit_tokens > 0)
    assert hits == [False, False, True, True]


def test_a_foreign_handle_and_an_absent_one_are_answered_alike() -> None:
    """A9, B5: the words differ in nothing but the handle that was asked for."""
    world = World(table())
    world.admit("victim", list(range(40)), request_id="r")
    messages = []
    for id_ in ("r", "absent"):
        for call in ("blocks", "fence", "commit"):
            with pytest.raises(HandleError) as raised:
                _use(world.governor, call, ("attacker", id_))
            messages.append(str(raised.value).replace(repr(id_), "ID"))
    assert messages[:3] == messages[3:]
    assert not world.governor.release(("attacker", "r")) and not world.governor.release(("attacker", "absent"))
    assert len(world.governor.running) == 1


def _use(governor: Governor, call: str, handle: Any) -> None:
    if call == "blocks":
        governor.blocks(handle)
    elif call == "fence":
        governor.fence([handle])
    else:
        governor.commit([handle], [1])


# -- B5 -------------------------------------------------------------------------------------------------------

GRANT = """\
grants:
  - {id: reads, owner: victim, reader: attacker, at_most: high, until: 2027-01-01, reason: test}"""
DENYING = "  - {id: no-grants-at-high, effect: forbid, action: reuse, when: {via: grant, classification: high}}"
# Why the attacker's request misses. It always asks the same prompts in the same way.
MISSES = ("absent", "foreign", "denied", "expired", "erased")


class _EarlyDeny(Governor):
    """A control: a denial is answered at once, without doing what a miss does."""

    def admit(self, principal: Any, model: Any, prompt: Any, **request: Any) -> Any:
        self.denied_early = False
        reuse = self._reuse

        def may(*arguments: Any) -> bool:
            permitted = ReuseDecider.may(reuse, *arguments)
            self.denied_early = not permitted
            return permitted

        reuse.may = may  # type: ignore[method-assign]
        answer = super().admit(principal, model, prompt, **request)
        if self.denied_early and principal.tenant == "attacker" and isinstance(answer, Admission):
            self.abort(answer.request_id)
            return AdmissionRefused(answer.request_id[1], "not yours")  # type: ignore[index]
        return answer


def _miss_world(kind: str, governor: type[Governor] = Governor) -> World:
    """A world in which the attacker's prompts will miss for the reason `kind`."""
    return World(table(sharing=GRANT, rules=DENYING if kind == "denied" else ""), governor=governor)


def _prompts(count: int, seed: int = 5) -> list[Any]:
    random = Random(seed)
    return [tokens(random, random.choice((1, 3, 20)) * BLOCK + 5) for _ in range(count)]


def _prepare(world: World, kind: str, prompts: list[Any]) -> None:
    """The victim's part: what it caches at `high` the grant opens, what it caches at `low` stays foreign."""
    governor = world.governor
    for prompt in prompts:
        other = prompt if kind != "absent" else np.flip(prompt)
        world.ask("victim", other, classification="low" if kind == "foreign" else "high")
    world.admit("attacker", [1], classification="high", request_id="settle")
    governor.settle()
    governor.release(("attacker", "settle"))
    if kind == "erased":
        governor.erase(Selector(tenant="victim"))
    world.step(60_000_000)
    world.clock.advance(3_600_000_000 if kind == "expired" else 0)
    while governor.stats().pools[0].overdue_residencies:
        governor.step()
    world.seen.clear()


def _transcript(kind: str, count: int, governor: type[Governor] = Governor) -> list[object]:
    world = _miss_world(kind, governor)
    prompts = _prompts(count)
    _prepare(world, kind, prompts)
    began = world.clock.now_us()
    for prompt in prompts:
        world.probe("attacker", prompt, classification="high")
        world.step()
        world.seen.append(world.clock.now_us() - began)
    tally = world.governor.tenant_counters["attacker"]
    world.seen.append((tally.requests, tally.hit_blocks, tally.prompt_tokens, tally.refused, tally.deferred))
    return world.seen


def _check_misses(count: int) -> None:
    transcripts = {kind: repr(_transcript(kind, count)) for kind in MISSES}
    assert len(set(transcripts.values())) == 1, {
        k: hashlib.sha256(t.encode()).hexdigest() for k, t in transcripts.items()
    }
    granted = World(table(sharing=GRANT))
    _prepare(granted, "granted", _prompts(8))
    hits = sum(granted.hit("attacker", p, classification="high") > 0 for p in _prompts(8))
    assert hits == 8, "void: with a live grant the same prompts must be hit"
    control = repr(_transcript("denied", min(count, 50), _EarlyDeny))
    absent = repr(_transcript("absent", min(count, 50), _EarlyDeny))
    assert control != absent, "void: an early denial must show"


def test_every_kind_of_miss_is_the_same_miss() -> None:
    """B5, small: 60 prompts, ten pairs of absent, foreign, denied, expired and erased; bytes and virtual time."""
    _check_misses(60)


@pytest.mark.soak
def test_every_kind_of_miss_at_full_size() -> None:
    """B5, full: 10^4 prompts in each of five worlds."""
    _check_misses(10_000)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["foreign", "expired", "erased", "denied"])
def test_misses_take_the_same_time(kind: str) -> None:
    """B5, the wall clock's part that is ours: the admission call, 2,000 a class, in three verdicts.

    Neither the victim's state nor a rule that denies a grant may show.
    """
    worlds = [_miss_world("absent"), _miss_world(kind)]
    prompts = [prompt[: 3 * BLOCK + 5] for prompt in _prompts(4000) if len(prompt) > 3 * BLOCK]
    for world, name in zip(worlds, ("absent", kind), strict=True):
        _prepare(world, name, prompts[:50])

    def measure() -> tuple[list[float], list[float]]:
        times: tuple[list[float], list[float]] = ([], [])
        random = Random(9)
        for at in range(4000):
            which = random.random() < 0.5
            prompt = prompts[at % len(prompts)].copy()
            began = time.perf_counter_ns()
            answer = worlds[which].admit("attacker", prompt, classification="high")
            times[which].append(time.perf_counter_ns() - began)
            worlds[which].governor.abort(answer.request_id)
        return times

    absent, other = measure()
    area = auc(absent, other)
    if area > AUC_GATE:
        half = len(absent) // 2
        drift = auc(absent[:half], absent[half:])
        if drift > AUC_GATE:
            pytest.skip(f"inconclusive: A = {area:.3f}, and one class drifts by {drift:.3f} against itself")
        area = auc(*measure())
    assert area <= AUC_GATE, f"{kind} can be told from absent by time, A = {area:.3f}"
