"""Door tokens: who can make one, for whom, for how long, and how often one counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token_bytes import decoded, encoded
from kvcustody.governance.edge import door_token
from kvcustody.governance.edge.door_token import (
    PREFIX,
    DoorClaims,
    DoorTokenIssuer,
    DoorTokens,
    PresentedToken,
    RejectedToken,
)
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.ids import SubjectId, TenantId
from standins.integrations.fleet_edge import door_key

ACME = Principal("corp", TenantId("acme"), SubjectId("ann"), subject_asserted=True, route="/v1/chat/completions")
NAMESPACE = "n" * 32


def claims(who: Principal = ACME, *, uses: int = 2, group: str = "default", hint: str | None = None) -> DoorClaims:
    return DoorClaims(who, Hints(hint), NAMESPACE, group, "request-1", uses)


class Fleet:
    """A door's issuer and verifiers of workers, by one clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.keys = [door_key().verifier]
        self.verifiers = [DoorTokens(lambda: self.keys, self.clock) for _ in range(2)]
        self.issuer = DoorTokenIssuer(door_key, self.clock)

    def issue(self, of: DoorClaims | None = None, *, ttl_seconds: int = 30, salt: bytes = b"") -> str:
        return self.issuer.issue(claims() if of is None else of, ttl_seconds=ttl_seconds, salt=salt)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def presented(found: PresentedToken | RejectedToken) -> PresentedToken:
    assert isinstance(found, PresentedToken), found
    return found


def reason(found: PresentedToken | RejectedToken) -> str:
    return found.reason if isinstance(found, RejectedToken) else "accepted"


@pytest.mark.parametrize("hint", [None, "confidential"])
@pytest.mark.parametrize("salt", [b"", b"twelve bytes"])
@pytest.mark.parametrize("subject", [None, "ann", "\u0141ukasz", "0b9a6d7e-8f3c-4f0e-9d53-2a1f4c5b6e7d", "s" * 128])
def test_what_was_issued_is_what_is_read(fleet: Fleet, hint: str | None, salt: bytes, subject: str | None) -> None:
    who = Principal("corp", TenantId("acme"), None if subject is None else SubjectId(subject), route="/v1/x")
    found = presented(fleet.verifiers[0].present(fleet.issue(claims(who, hint=hint), salt=salt)))
    assert found.claims.principal == who and found.claims.hints.classification == hint
    assert (found.claims.namespace, found.claims.request_id, found.claims.uses) == (NAMESPACE, "request-1", 2)
    assert found.claims.hints.salt == (encoded(salt) if salt else None)
    assert found.door == door_key().name and found.expires_utc_us - found.issued_utc_us == 30 * MICROSECONDS


def test_no_byte_of_a_token_can_be_changed(fleet: Fleet) -> None:
    """Another tenant, request id, group, deadline, use or signature: each is some byte."""
    data = decoded(fleet.issue().removeprefix(PREFIX))
    assert data is not None
    for place in range(len(data)):
        for flip in (0x01, 0x80):
            changed = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
            found = fleet.verifiers[0].present(PREFIX + encoded(changed))
            assert isinstance(found, RejectedToken), place
    for shorter in range(len(data)):
        assert isinstance(fleet.verifiers[0].present(PREFIX + encoded(data[:shorter])), RejectedToken)
    assert isinstance(fleet.verifiers[0].present(PREFIX + encoded(data + b"\0")), RejectedToken)


def test_without_the_signature_a_forged_tenant_would_pass(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: verification accepts every signature."""
    token = _forged(fleet, door_key().verifier.key_id)
    assert reason(fleet.verifiers[0].present(token)) == "forged"

    class Trusting:
        @staticmethod
        def from_public_bytes(_: bytes) -> Trusting:
            return Trusting()

        def verify(self, *_: bytes) -> None:
            pass

    monkeypatch.setattr(door_token, "Ed25519PublicKey", Trusting)
    assert presented(fleet.verifiers[0].present(token)).claims.principal.tenant == "victim"


def _forged(fleet: Fleet, key_id: bytes) -> str:
    """What a worker can make: the victim's token, signed by a key of its own, under any key's id."""
    own = SigningKey.from_seed("worker.example", KeyKind.ED25519, bytes([9]) * 32)
    made = DoorTokenIssuer(lambda: own, fleet.clock).issue(claims(Principal("corp", TenantId("victim"))))
    data = decoded(made.removeprefix(PREFIX))
    assert data is not None
    return PREFIX + encoded(data[:1] + key_id + data[5:])


def test_a_worker_can_make_no_token(fleet: Fleet) -> None:
    own = SigningKey.from_seed("worker.example", KeyKind.ED25519, bytes([9]) * 32)
    for key_id, said in ((own.verifier.key_id, "other-key"), (door_key().verifier.key_id, "forged")):
        token = _forged(fleet, key_id)
        assert [reason(each.present(token)) for each in fleet.verifiers] == [said, said]


def test_a_public_key_signs_nothing() -> None:
    assert not hasattr(Ed25519PublicKey, "sign")


def test_uses_are_counted_at_each_worker(fleet: Fleet) -> None:
    """A router that keeps a token can spend its uses once at each live worker, until its deadline: no more."""
    token = fleet.issue(claims(uses=3))
    for verifier in fleet.verifiers:
        found = presented(verifier.present(token))
        assert verifier.spend(found, 2) is None
        assert verifier.spend(found, 2) == RejectedToken("replayed"), "two are more than the one that is left"
        assert verifier.spend(presented(verifier.present(token)), 1) is None
        assert verifier.spend(found, 1) == RejectedToken("replayed")


def test_more_uses_than_declared_are_none(fleet: Fleet) -> None:
    found = presented(fleet.verifiers[0].present(fleet.issue(claims(uses=2))))
    assert fleet.verifiers[0].spend(found, 3) == RejectedToken("replayed")
    assert fleet.verifiers[0].spend(found, 2) is None


@pytest.mark.parametrize("seconds", [1, 30, 60])
def test_a_token_ends_at_its_deadline(fleet: Fleet, seconds: int) -> None:
    token, verifier = fleet.issue(ttl_seconds=seconds), fleet.verifiers[0]
    fleet.clock.advance(seconds * MICROSECONDS - 1000)
    found = presented(verifier.present(token))
    fleet.clock.advance(1000)
    assert reason(verifier.present(token)) == "expired" and verifier.spend(found, 1) == RejectedToken("expired")
    assert reason(verifier.present(token)) == "expired"


def test_a_restarted_worker_takes_no_earlier_token(fleet: Fleet) -> None:
    token = fleet.issue()
    fleet.clock.advance(1000)
    assert reason(DoorTokens(lambda: fleet.keys, fleet.clock).present(token)) == "before-start"


def test_a_token_of_the_future_is_refused(fleet: Fleet) -> None:
    ahead = VirtualClock(utc_us=fleet.clock.utc_us() + 6 * MICROSECONDS)
    assert reason(fleet.verifiers[0].present(DoorTokenIssuer(door_key, ahead).issue(claims()))) == "future-dated"


def test_a_token_is_for_one_group(fleet: Fleet) -> None:
    other = DoorTokens(lambda: fleet.keys, fleet.clock, group="dedicated")
    assert reason(other.present(fleet.issue())) == "other-group"
    assert presented(other.present(fleet.issue(claims(group="dedicated")))).claims.group == "dedicated"


def test_keys_overlap_while_one_is_replaced(fleet: Fleet) -> None:
    current = [door_key(1)]
    issuer = DoorTokenIssuer(lambda: current[0], fleet.clock)
    first, verifier = issuer.issue(claims()), fleet.verifiers[0]
    fleet.keys = [door_key(1).verifier, door_key(2).verifier]
    current[0] = door_key(2)
    second = issuer.issue(claims())
    assert [presented(verifier.present(each)).door for each in (first, second)] == [
        door_key(1).name,
        door_key(2).name,
    ]
    fleet.keys = [door_key(2).verifier]
    assert reason(verifier.present(first)) == "other-key" and presented(verifier.present(second))


def test_a_full_memory_refuses_and_forgets_nothing(fleet: Fleet) -> None:
    small = DoorTokens(lambda: fleet.keys, fleet.clock, remembered_max=4)
    found = [presented(small.present(fleet.issue(claims(uses=1)))) for _ in range(2)]
    assert [small.spend(each, 1) for each in found] == [None, RejectedToken("memory-full")], "a quarter a tenant"
    assert small.spend(found[0], 1) == RejectedToken("replayed")


@pytest.mark.parametrize(
    "make",
    [
        lambda fleet: fleet.issue(claims(uses=0)),
        lambda fleet: fleet.issue(claims(uses=65_536)),
        lambda fleet: fleet.issue(ttl_seconds=0),
        lambda fleet: fleet.issue(ttl_seconds=61),
        lambda fleet: DoorTokenIssuer(_post_quantum, fleet.clock),
    ],
)
def test_what_is_out_of_bounds_is_refused(fleet: Fleet, make: Callable[[Fleet], object]) -> None:
    with pytest.raises(ConfigError):
        make(fleet)


def _post_quantum() -> SigningKey:
    return SigningKey.from_seed("door.example", KeyKind.COSIGNATURE, bytes(32))


@pytest.mark.parametrize("field", ["group", "request_id", "namespace"])
@pytest.mark.parametrize("value", ["", "a b", "x" * 161])
def test_a_malformed_name_is_refused(fleet: Fleet, field: str, value: str) -> None:
    with pytest.raises(IdentityError, match=field):
        fleet.issue(claims()._replace(**{field: value}))


@pytest.mark.parametrize("text", ["", "kvd1.", "kvd1.!!!!", "kvd2.AAAA", "kvd1." + "A" * 400, "kvd1." + "A" * 9000])
def test_what_is_no_token_is_malformed(fleet: Fleet, text: str) -> None:
    assert reason(fleet.verifiers[0].present(text)) in ("malformed", "other-key")
