"""Scope tokens T1-T5: nothing forged, cut, changed, late, early, foreign or used twice is ever believed."""

from __future__ import annotations

import base64
import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ConfigError, IdentityError, KeyringError
from kvcustody.governance.credentials import scope_token
from kvcustody.governance.credentials import scope_token_bytes as scope_record
from kvcustody.governance.credentials.scope_token import (
    FUTURE_MS_MAX,
    SALT_CHARACTERS_MAX,
    Rejected,
    ScopeTokens,
    VerifiedToken,
)
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.credentials.spent_tokens import SpentTokens
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.request import Hints
from kvcustody.ids import SessionId, SubjectId, TenantId

ALICE = Principal("https://idp.example", TenantId("acme"), SubjectId("alice"), route="/v1/completions")
VLLM_FORBIDS = set("@/\\\x00")


def secret(byte: int = 7) -> KeyBuffer:
    buffer = KeyBuffer()
    buffer.writable()[:] = bytes([byte]) * 32
    return buffer


def tokens(clock: VirtualClock | None = None, **options: Any) -> ScopeTokens:
    return ScopeTokens(secret(options.pop("byte", 7)), clock or VirtualClock(), **options)


def reason(outcome: VerifiedToken | Rejected) -> str:
    assert isinstance(outcome, Rejected), "believed"
    return outcome.reason


def verified(outcome: VerifiedToken | Rejected) -> VerifiedToken:
    assert isinstance(outcome, VerifiedToken), outcome
    return outcome


IDENTIFIERS = st.text("abcXYZ019._:@+=~,|'-é漢", min_size=1, max_size=128).filter(
    lambda text: text not in (".", "..")
) | st.uuids().flatmap(lambda one: st.sampled_from([str(one), str(one).upper(), one.hex]))
ROUTES = (
    IDENTIFIERS.filter(lambda text: len(text) < 128)
    .map(lambda text: "/" + text)
    .filter(lambda text: "/./" not in text + "/" and "/../" not in text + "/")
)


@st.composite
def principals(draw: st.DrawFn) -> Principal:
    subject, session = draw(st.none() | IDENTIFIERS), draw(st.none() | IDENTIFIERS)
    return Principal(
        issuer=draw(IDENTIFIERS),
        tenant=TenantId(draw(IDENTIFIERS)),
        subject=None if subject is None else SubjectId(subject),
        session=None if session is None else SessionId(session),
        subject_asserted=subject is not None and draw(st.booleans()),
        session_asserted=session is not None and draw(st.booleans()),
        classification=draw(st.none() | IDENTIFIERS),
        route=draw(st.none() | ROUTES),
    )


@settings(max_examples=100, deadline=None)
@given(principals(), st.none() | IDENTIFIERS, st.none() | st.text("abc é!@/", min_size=1, max_size=128))
def test_what_is_issued_is_verified_and_nothing_is_lost(
    principal: Principal, hint: str | None, salt: str | None
) -> None:
    both = tokens()
    carried = both.carry(both.issue(principal, classification=hint, client_salt=salt))
    found = verified(both.verify(*carried))
    assert found.principal == principal
    assert found.hints.classification == hint
    assert (found.hints.salt is None) == (salt is None)
    assert len(carried.cache_salt) <= SALT_CHARACTERS_MAX and not VLLM_FORBIDS & set(carried.cache_salt)
    assert reason(both.verify(*carried)) == "replayed"


@settings(max_examples=100, deadline=None)
@given(principals(), principals())
def test_different_principals_never_share_a_record(one: Principal, other: Principal) -> None:
    def record(principal: Principal) -> tuple[int, bytes]:
        return scope_record.pack_identity(principal, principal.route, None)

    assert (one == other) == (record(one) == record(other))


@pytest.mark.parametrize("epochs", [None, Epochs(), Epochs(0, 1, 256), Epochs(2**63, 2**40, 7)])
def test_epochs_travel_with_the_identity(epochs: Epochs | None) -> None:
    """None and zeros differ: a door that knows of no erasure is a door."""
    made = tokens()
    for salt in (None, "mine"):
        found = verified(made.verify(made.issue(ALICE, client_salt=salt, epochs=epochs)))
        assert (found.principal, found.hints.epochs) == (ALICE, epochs)
        assert (found.hints.salt is None) == (salt is None)
        assert verified(made.verify(made.issue(ALICE, client_salt=salt))).hints.epochs is None


def test_a_usual_identity_fits_in_the_salt_alone_and_a_long_one_is_carried_beside() -> None:
    both = tokens()
    usual = both.carry(both.issue(ALICE))
    assert usual.transfer is None and len(usual.cache_salt) <= 128
    guid = "0b7b3c1e-52a4-4a52-9f5e-3b1f6d1c9a77"
    entra = Principal("entra", TenantId(guid), SubjectId(guid), route="/v1/embeddings")
    assert both.carry(both.issue(entra)).transfer is None
    long = both.carry(both.issue(Principal("idp", TenantId("t" * 128))))
    assert long.transfer is not None and len(long.cache_salt) == 26
    assert reason(both.verify(long.cache_salt)) == "incomplete"
    assert reason(both.verify(long.transfer, long.transfer)) == "malformed"
    another = both.carry(both.issue(Principal("idp", TenantId("t" * 128))))
    assert reason(both.verify(long.cache_salt, another.transfer)) == "incomplete"
    assert isinstance(both.verify(*long), VerifiedToken)


def test_every_single_bit_flip_and_every_cut_is_rejected_and_spends_nothing() -> None:
    both = tokens()
    token = both.issue(ALICE, client_salt="s")
    data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    reasons: Counter[str] = Counter()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        reasons[reason(both.verify(scope_record.encoded(bytes(flipped))))] += 1
    for length in range(len(token)):
        reasons[reason(both.verify(token[:length]))] += 1
    assert set(reasons) <= {"malformed", "forged", "other-key", "incomplete"}
    assert reasons["forged"] >= 8 * (len(data) - 3)
    assert isinstance(both.verify(token), VerifiedToken)  # the control: the untouched one is still good


def test_without_the_tag_compare_the_flips_would_be_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    both = tokens()
    token = both.issue(ALICE)
    data = bytearray(scope_record.decoded(token) or b"")
    data[data.index(b"acme")] = ord("e")
    forged = scope_record.encoded(bytes(data))
    assert reason(both.verify(forged)) == "forged"
    monkeypatch.setattr(scope_token.hmac, "compare_digest", lambda *_: True)
    assert verified(both.verify(forged)).principal.tenant == "ecme"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "missing"),
        ("", "malformed"),
        (b"AQ", "malformed"),
        (7, "malformed"),
        (["AQ"], "malformed"),
        ("a" * 100, "malformed"),
        ("A" * (1 << 20), "malformed"),
        ("AQ==", "malformed"),
        ("\ud800" * 40, "malformed"),
        ("é" * 60, "malformed"),
        ("\x00" * 60, "malformed"),
        ("AQ" + "A" * 60 + "\n", "malformed"),
    ],
)
def test_hostile_salts_are_rejected_without_an_exception(value: object, expected: str) -> None:
    both = tokens()
    assert reason(both.verify(value)) == expected
    if value is not None:
        long = both.carry(both.issue(Principal("idp", TenantId("t" * 128))))
        assert reason(both.verify(long.cache_salt, value)) == "incomplete"


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=90).map(scope_record.encoded), st.none() | st.text(max_size=99))
def test_random_salts_are_rejected_without_an_exception(salt: str, transfer: str | None) -> None:
    assert isinstance(tokens().verify(salt, transfer), Rejected)


def test_one_text_has_one_encoding() -> None:
    both = tokens()
    token = both.issue(ALICE)
    assert len(token) % 4 in (2, 3), "this principal leaves bits over in the last character"
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    neighbour = token[:-1] + alphabet[alphabet.index(token[-1]) + 1]
    assert base64.urlsafe_b64decode(neighbour + "===") == base64.urlsafe_b64decode(token + "===")
    assert reason(both.verify(neighbour)) == "malformed"
    for spoiled in (token + "=", token + "\n", " " + token, token + "A", token.replace("-", "+")):
        if spoiled != token:
            assert isinstance(both.verify(spoiled), Rejected)
    assert isinstance(both.verify(token), VerifiedToken)


def test_another_deployments_token_is_rejected_for_its_key() -> None:
    foreign = tokens(byte=8).issue(ALICE)
    assert reason(tokens(byte=7).verify(foreign)) == "other-key"
    assert isinstance(tokens(byte=8).verify(foreign), VerifiedToken)


def test_a_token_lives_from_issue_to_expiry() -> None:
    clock = VirtualClock()
    both = tokens(clock)
    first, second = both.issue(ALICE, ttl_seconds=60), both.issue(ALICE, ttl_seconds=60)
    clock.advance(60 * MICROSECONDS - 1_000)
    assert isinstance(both.verify(first), VerifiedToken)
    clock.advance(1_000)
    assert reason(both.verify(second)) == "expired"


def test_a_token_from_the_future_is_rejected_beyond_the_leeway() -> None:
    clock, ahead = VirtualClock(), VirtualClock()
    engine = tokens(clock)
    ahead.step_utc(FUTURE_MS_MAX * 1_000)
    door = tokens(ahead)
    assert isinstance(engine.verify(door.issue(ALICE)), VerifiedToken)
    ahead.step_utc(1_000)
    assert reason(engine.verify(door.issue(ALICE))) == "future-dated"


def test_neither_a_stepped_clock_nor_a_restart_revives_a_token() -> None:
    clock = VirtualClock()
    both = tokens(clock)
    spent = both.issue(ALICE, ttl_seconds=10)
    assert isinstance(both.verify(spent), VerifiedToken)
    clock.advance(20 * MICROSECONDS)
    assert isinstance(both.verify(both.issue(ALICE)), VerifiedToken)  # sweeps what has expired
    assert len(both._spent) == 1
    clock.step_utc(-20 * MICROSECONDS)
    assert reason(both.verify(spent)) == "expired"
    fresh = tokens(clock)
    unused = fresh.issue(ALICE)
    clock.advance(1_000)
    restarted = tokens(clock)
    assert reason(restarted.verify(unused)) == "before-start"
    assert isinstance(restarted.verify(restarted.issue(ALICE)), VerifiedToken)


def test_a_token_covers_exactly_its_uses() -> None:
    both = tokens()
    token = both.issue(ALICE, uses=3)
    assert [verified(both.verify(token)).uses_left for _ in range(3)] == [2, 1, 0]
    assert reason(both.verify(token)) == "replayed"


def test_uses_are_counted_once_across_threads() -> None:
    both = tokens()
    token = both.issue(ALICE, uses=500)
    outcomes: list[VerifiedToken | Rejected] = []

    def spend() -> None:
        outcomes.extend(both.verify(token) for _ in range(200))

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [outcome.uses_left for outcome in outcomes if isinstance(outcome, VerifiedToken)]
    assert sorted(left) == list(range(500))


def test_a_full_memory_refuses_and_forgets_nothing_that_lives() -> None:
    clock = VirtualClock()
    both = tokens(clock, remembered_max=4, remembered_per_tenant_max=4)
    spent = [both.issue(ALICE, ttl_seconds=30) for _ in range(5)]
    assert [type(both.verify(token)) for token in spent] == [VerifiedToken] * 4 + [Rejected]
    assert reason(both.verify(spent[4])) == "memory-full"
    assert reason(both.verify(spent[0])) == "replayed"
    clock.advance(32 * MICROSECONDS)
    assert isinstance(both.verify(both.issue(ALICE)), VerifiedToken)
    assert len(both._spent) == 1


def test_one_tenant_cannot_fill_the_memory_of_another() -> None:
    both = tokens(remembered_max=8, remembered_per_tenant_max=2)
    flood = [both.verify(both.issue(ALICE)) for _ in range(9)]
    assert [type(outcome) for outcome in flood] == [VerifiedToken] * 2 + [Rejected] * 7
    other = Principal("https://idp.example", TenantId("globex"))
    assert isinstance(both.verify(both.issue(other)), VerifiedToken)
    shared = tokens(remembered_max=8, remembered_per_tenant_max=8)  # the control: one memory for all
    for _ in range(9):
        shared.verify(shared.issue(ALICE))
    assert reason(shared.verify(shared.issue(other))) == "memory-full"


def test_the_memory_of_spent_tokens_against_a_model() -> None:
    spent = SpentTokens(50, 50)
    for now_s, tag in itertools.product(range(100, 160), range(7)):
        birth_s = now_s - now_s % 5  # each tag lives for five seconds and has three uses
        outcome = spent.spend(bytes([tag, birth_s]), 3, "t", 1_000 * (birth_s + 5), 1_000 * now_s)
        assert outcome == (2, 1, 0, "replayed", "replayed")[now_s - birth_s]
        assert len(spent) <= 14, "what expired is forgotten within a second"


def test_a_clients_salt_narrows_under_the_key_and_is_not_readable() -> None:
    both = tokens()

    def salt(text: str | None, issuer: ScopeTokens = both) -> str | None:
        token = issuer.issue(ALICE, client_salt=text)
        assert text is None or text.encode() not in (scope_record.decoded(token) or b"")
        found = issuer.verify(token)
        return verified(found).hints.salt

    assert salt("tuesday's batch") == salt("tuesday's batch") != salt("tuesday's batcH")
    assert salt(None) is None
    assert salt("tuesday's batch", tokens(byte=8)) != salt("tuesday's batch")


@pytest.mark.parametrize("salt", ["", "s" * 129, "a\nb", "a\x00", "\u202e", 7, b"s"])
def test_a_malformed_client_salt_is_refused_unquoted(salt: Any) -> None:
    with pytest.raises(IdentityError, match=r"^KVC200: cache_salt: ") as caught:
        tokens().issue(ALICE, client_salt=salt)
    assert not salt or str(salt) not in str(caught.value)


def test_issue_refuses_what_no_token_can_say() -> None:
    for wrong in ({"uses": 0}, {"uses": 65_536}, {"ttl_seconds": 0}, {"ttl_seconds": 3_601}):
        with pytest.raises(ConfigError):
            tokens().issue(ALICE, **wrong)
    for wrong_text in ({"route": "v1"}, {"route": ""}, {"classification": "a b"}):
        with pytest.raises(IdentityError):
            tokens().issue(ALICE, **wrong_text)  # type: ignore[arg-type]


def test_route_and_hint_travel() -> None:
    both = tokens()
    found = verified(both.verify(both.issue(ALICE, route="/v1/hr", classification="restricted")))
    assert found.principal.route == "/v1/hr"
    assert found.hints == Hints("restricted", None)
    assert found.expires_utc_us - found.issued_utc_us == 60 * MICROSECONDS


def _read_key(path: Path) -> bytes:
    with open_scope_key(path) as key:
        return bytes(key.view())


def test_processes_that_race_to_make_the_key_share_one(tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = pool.map(_read_key, [path] * 16, chunksize=1)
    assert len(set(found)) == 1 and found[0] == path.read_bytes() and len(found[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["scope.key"]


def test_a_key_file_open_to_others_or_linked_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    _read_key(path)
    path.chmod(0o640)
    with pytest.raises(KeyringError, match=r"scope token key .*: has mode `0640`"):
        open_scope_key(path)
    path.chmod(0o600)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    with pytest.raises(KeyringError, match="is a symbolic link"):
        open_scope_key(link)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyringError, match="is a symbolic link"):
        open_scope_key(link)
    with pytest.raises(KeyringError, match="cannot be created"):
        open_scope_key(tmp_path / "absent" / "scope.key")


def test_tokens_need_no_torch() -> None:
    program = (
        "import sys; import kvcustody.governance.credentials.scope_token;"
        "import kvcustody.governance.credentials.scope_token_secret;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
