"""A4-A6, A11: keys over the whole path, from an identity and a prompt through the Governor to a hit or a miss."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import model_identity, tlv
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.identity.extra_content import Media, Positions, PromptEmbeddings, frame
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.request import Hints
from kvcustody.ids import SessionId, SubjectId, TenantId
from standins.builders import MemoryKeyStore
from standins.redteam.two_worlds import BLOCK, ISSUER, World, model, table, tokens

PROMPT = list(range(100, 100 + BLOCK + 1))  # one whole block and the last token, which is always computed
OPEN = "  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}"


def _spec(fields: dict[str, Any], text: str) -> DomainSpec:
    """What a careless build would key by: one text for everything."""
    return DomainSpec(
        scope=fields["scope"],
        issuer=ISSUER,
        tenant="everyone",
        subject="everyone" if fields["scope"] is ScopeKind.SUBJECT else None,
        session=None,
        classification="low",
        model=hashlib.sha256(text.encode()).digest(),
        key_epoch=1,
    )


# -- A4 -------------------------------------------------------------------------------------------------------

PIECES = [None, "1", "12", "123", "2", "23", "3", "a", "A", "a1", "1a", ":", "1:", ":1", "a:", ":a", "::", "01",
          "001", "None", "null", "|", "é", "e\u0301", "1|a", "", " 1", "1\x00", "\uff11", "0", "-", "a/b"]  # fmt: skip


def _identities() -> Iterator[tuple[Any, Any, Any, Any]]:
    """Distinct (tenant, subject, session, salt) made of pieces that joining confuses, the short ones first."""
    pieces, length = list(PIECES), 0
    while True:
        for tuple_ in itertools.product(pieces[1:], pieces, (None, "1", "12"), pieces):
            if length and not any(piece is not None and len(piece) > length for piece in tuple_):
                continue
            yield tuple_
        length = max(len(p) for p in pieces if p is not None)
        pieces += sorted({a + b for a in pieces if a for b in pieces if b} - set(pieces))[:200]


def _salt_confusion(count: int) -> tuple[int, int, int]:
    """(identities admitted, foreign hits among their first sights, misses among their own returns)."""
    world = World(table(scope="subject", tenants=OPEN), blocks=count + 1024)
    first = hits = lost = 0
    seen: set[tuple[Any, ...]] = set()
    for tenant, subject, session, salt in _identities():
        if first == count:
            break
        try:
            principal = Principal(ISSUER, tenant, subject, session)
            key = Hints(None, salt)
            answer = world.governor.admit(principal, model(), PROMPT, hints=key)
        except IdentityError:
            continue  # refused before anything is keyed: nothing to confuse
        # A subject's sessions share; without a subject the session is the scope, and without both nothing is reused.
        scope = (tenant, subject, None if subject else session, salt)
        may_hit = scope in seen
        seen.add(scope) if subject or session else None
        first += not may_hit
        hits += answer.hit_tokens > 0 and not may_hit
        lost += answer.hit_tokens == 0 and may_hit
        world.finish(answer, len(PROMPT))
    return first, hits, lost


def _joined(separator: str) -> Callable[..., DomainSpec]:
    def own(principal: Principal, **fields: Any) -> DomainSpec:
        parts = (principal.tenant, principal.subject, principal.session, fields["salt"])
        return _spec(fields, separator.join(part or "" for part in parts))

    return own


def _confused(count: int, separator: str, monkeypatch: pytest.MonkeyPatch) -> int:
    with monkeypatch.context() as patch:
        patch.setattr("kvcustody.governance.decisions.access_plan.own_domain", _joined(separator))
        patch.setattr(
            "kvcustody.governance.keys.keyring.Keyring.derive",
            lambda self, owner, epoch, info, into: into.take(bytearray(hashlib.sha256(info).digest())),
        )
        return _salt_confusion(count)[1]


def _check_salt_confusion(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, hits, lost = _salt_confusion(count)
    assert (first, hits, lost) == (count, 0, 0)
    small = min(count, 1_000)
    assert _confused(small, "", monkeypatch) > small // 20, "void: joined ids must collide"
    assert _confused(small, ":", monkeypatch) > small // 200, "void: ids joined by a separator must collide"


def test_confusable_identities_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4, small: 400 identities made to be confused, end to end (10^6 tuples by encoding: governance/test_tlv)."""
    _check_salt_confusion(400, monkeypatch)


@pytest.mark.soak
def test_confusable_identities_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4, full: 10^5 identities through the Governor."""
    _check_salt_confusion(100_000, monkeypatch)


# -- A5 -------------------------------------------------------------------------------------------------------

MODEL_TEXTS = ("weights_digest", "tokenizer_digest", "chat_template", "quantization", "kv_dtype", "kv_layout",
               "shard_layout", "adapter_digest")  # fmt: skip
IDENTITY_TEXTS = ("tenant", "subject", "session", "salt")
MEDIA = "media"
DEFAULT = "d"


def _with_field(world: World, field: str, value: str) -> int:
    """Hit tokens of one request in which `field` alone has `value` and every other text has the default."""
    texts: dict[str, Any] = dict.fromkeys(MODEL_TEXTS, DEFAULT)
    ids: dict[str, Any] = dict.fromkeys(IDENTITY_TEXTS, DEFAULT)
    extras = {0: frame(Media(value.encode(), (1,), "u8"))} if field == MEDIA else None
    if field in texts:
        texts[field] = value
    elif field in ids:
        ids[field] = value
    principal = Principal(ISSUER, TenantId(ids["tenant"]), SubjectId(ids["subject"]), SessionId(ids["session"]))
    answer = world.governor.admit(
        principal,
        model(adapter_epoch=1, **texts),
        PROMPT,
        hints=Hints(None, ids["salt"]),
        extras=extras,
    )
    world.finish(answer, len(PROMPT))
    return int(answer.hit_tokens)


def _cross_hits(values: int) -> int:
    """Every field gets the same value in turn: a hit is one of another field's. Covers all n(n-1) ordered pairs."""
    fields = (*MODEL_TEXTS, "tenant", "subject", "salt", MEDIA)
    world = World(table(scope="subject", tenants=OPEN), blocks=len(fields) * values + 1024)
    hits = 0
    for at in range(values):
        for field in fields:
            hits += _with_field(world, field, f"v{at}") > 0
    return hits


def _untagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: texts are keyed as a bag, without saying which is which."""
    fields_of = model_identity.ModelIdentity.encoded_fields

    def bag(self: Any) -> dict[int, tlv.Value]:
        return {1: tuple(sorted(value for value in fields_of(self).values() if isinstance(value, str)))}

    def own(principal: Principal, **fields: Any) -> DomainSpec:
        ids = sorted([principal.tenant, principal.subject or "", principal.session or "", fields["salt"]])
        return _spec(fields, repr((ids, fields["model"])))

    monkeypatch.setattr(model_identity.ModelIdentity, "encoded_fields", bag)
    monkeypatch.setattr("kvcustody.governance.decisions.access_plan.own_domain", own)
    monkeypatch.setattr(
        "kvcustody.governance.keys.keyring.Keyring.derive",
        lambda self, owner, epoch, info, into: into.take(bytearray(hashlib.sha256(info).digest())),
    )


def test_a_value_in_one_field_is_not_the_same_value_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5, small: 12 fields, 132 ordered pairs, 12 values each."""
    assert _cross_hits(12) == 0
    _untagged(monkeypatch)
    assert _cross_hits(12) >= 12 * (7 + 2), "void: an untagged bag must confuse every two fields of a kind"


@pytest.mark.soak
def test_domain_separation_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5, full: 132 ordered pairs, 10^3 values each."""
    assert _cross_hits(1000) == 0
    _untagged(monkeypatch)
    assert _cross_hits(12) >= 12 * (7 + 2), "void: an untagged bag must confuse every two fields of a kind"


# -- A6 -------------------------------------------------------------------------------------------------------

BASE = model(adapter_digest="sha256:a", adapter_epoch=1)
_BASE = {name: getattr(BASE, name) for name in model_identity.ModelIdentity.__dataclass_fields__ if name != "digest"}

MODEL_FLIPS: dict[str, Any] = {
    "weights_digest": "sha256:w2",
    "weights_epoch": 2,
    "tokenizer_digest": "sha256:t2",
    "chat_template": "template-2",
    "quantization": "fp8",
    "kv_dtype": "fp8_e4m3",
    "kv_layout": "hnd",
    "block_tokens": 32,
    "rope": {"base": 500_000},
    "attention": {"heads": 8, "head_dim": 128, "window": 4096},
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "shard_layout": "interleaved",
    "adapter_digest": "sha256:a2",
    "adapter_epoch": 2,
}
IMAGE = Media(b"digest-of-image-", (3, 224, 224), "u8", b"palette")
EXTRA_FLIPS: dict[str, tuple[Any, Any]] = {
    "media digest": (IMAGE, IMAGE._replace(digest=b"digest-of-other-")),
    "media shape": (IMAGE, IMAGE._replace(shape=(3, 112, 448))),
    "media dtype": (IMAGE, IMAGE._replace(dtype="i8")),
    "media palette": (IMAGE, IMAGE._replace(palette=b"inverse")),
    "media absent": (IMAGE, None),
    "prompt embeddings": (PromptEmbeddings(b"e", (16, 8), "bf16"), PromptEmbeddings(b"f", (16, 8), "bf16")),
    "position offset": (Positions(0), Positions(1)),
    "positions digest": (Positions(0, b"p"), Positions(0, b"q")),
}
# Two routes of one classification and two regions; labels reach the domain.
ROUTES = """\
  - {tenant: "*", route: /v1/eu/*, labels: {region: eu}}
  - {tenant: "*", route: /v1/us/*, labels: {region: us}}"""


def _pair_hits(count: int, first: dict[str, Any], second: dict[str, Any], between: Any = None) -> tuple[int, int]:
    """How many of `count` prompts that went with `first` are hit with `second`, and again with `first`."""
    world = World(table(classify=ROUTES), blocks=8 * count + 1024)
    random = Random(6)
    prompts = [tokens(random, 2 * BLOCK + 1) for _ in range(count)]
    for prompt in prompts:
        assert world.hit("acme", prompt, **first) == 0
    kept = sum(world.hit("acme", prompt, **first) > 0 for prompt in prompts)
    if between is not None:
        between(world)
    return sum(world.hit("acme", prompt, **second) > 0 for prompt in prompts), kept


def _flip_model(field: str, count: int) -> tuple[int, int]:
    return _pair_hits(
        count,
        {"model": model_identity.ModelIdentity(**_BASE)},
        {"model": model_identity.ModelIdentity(**(_BASE | {field: MODEL_FLIPS[field]}))},
    )


def _flip_extra(name: str, count: int) -> tuple[int, int]:
    of_first, of_second = EXTRA_FLIPS[name]
    framed = [None if extra is None else {0: frame(extra)} for extra in (of_first, of_second)]
    return _pair_hits(count, {"extras": framed[0]}, {"extras": framed[1]})


def _rotate(world: World) -> None:
    world.keyring.rotate(tenant_owner(ISSUER, "acme"))
    world.governor.reload_keys()


def _flip_other(name: str, count: int) -> tuple[int, int]:
    if name == "classification":
        return _pair_hits(count, {}, {"classification": "high"})
    if name == "labels":
        return _pair_hits(count, {"route": "/v1/eu/chat"}, {"route": "/v1/us/chat"})
    return _pair_hits(count, {}, {}, _rotate)


def _without_field(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields_of = model_identity.ModelIdentity.encoded_fields
    names = [name for name in model_identity.ModelIdentity.__dataclass_fields__ if name != "digest"]
    tag = names.index(field) + 1
    monkeypatch.setattr(
        model_identity.ModelIdentity,
        "encoded_fields",
        lambda self: {at: value for at, value in fields_of(self).items() if at != tag},
    )


def _without_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {
        "classification": {"classification": "low"},
        "labels": {"labels": ()},
        "key epoch": {"key_epoch": 1},
    }
    from kvcustody.governance.custody import custody
    from kvcustody.governance.decisions import access_plan as plan

    own, bind = plan.own_domain, custody.apply_limits
    monkeypatch.setattr(plan, "own_domain", lambda principal, **fields: own(principal, **(fields | fixed[name])))
    if name == "key epoch":  # a second defence ends the blocks of older epochs; this control is about the keys
        monkeypatch.setattr(custody, "apply_limits", lambda *places, **how: bind(*places, **(how | {"epoch_of": None})))


OTHERS = ("classification", "labels", "key epoch")


def _check_model_flip(field: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flip_model(field, count) == (0, count)
    _without_field(field, monkeypatch)
    assert _flip_model(field, 8)[0] == 8, "void: without the field every prompt must be hit"


def _check_extra_flip(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flip_extra(name, count) == (0, count)
    of_first, _ = EXTRA_FLIPS[name]
    same = {0: frame(of_first)}
    assert _pair_hits(8, {"extras": same}, {"extras": dict(same)})[0] == 8, "void: equal content must be hit"


def _check_other_flip(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flip_other(name, count) == (0, count)
    _without_part(name, monkeypatch)
    assert _flip_other(name, 8)[0] == 8, "void: without the field every prompt must be hit"


@pytest.mark.parametrize("field", MODEL_FLIPS)
def test_each_field_of_the_model_separates(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6, small: 20 prompts a field."""
    _check_model_flip(field, 20, monkeypatch)


@pytest.mark.parametrize("name", EXTRA_FLIPS)
def test_each_part_of_extra_content_separates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6, small: 20 prompts a part."""
    _check_extra_flip(name, 20, monkeypatch)


@pytest.mark.parametrize("name", OTHERS)
def test_classification_labels_and_epoch_separate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6, small: 20 prompts each."""
    _check_other_flip(name, 20, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("name", (*MODEL_FLIPS, *EXTRA_FLIPS, *OTHERS))
def test_identity_omission_at_full_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6, full: 10^3 prompts a field."""
    check = _check_model_flip if name in MODEL_FLIPS else _check_extra_flip
    (_check_other_flip if name in OTHERS else check)(name, 1000, monkeypatch)


def test_what_does_not_condition_values_does_not_separate() -> None:
    """A6: request ids, room for drafts and preemption rights keep every hit; sampling is no part of admission."""
    hits, kept = _pair_hits(100, {}, {"lookahead_tokens": 5, "can_preempt": True})
    assert (hits, kept) == (100, 100)


# -- A11 ------------------------------------------------------------------------------------------------------


def _cached_keys(world: World) -> set[bytes]:
    return {
        node.keys[at : at + 32]
        for manager in world.governor.managers
        for _, node in manager.tree.index.items()
        for at in range(0, len(node.keys), 32)
    }


def _formulas(info: bytes) -> list[Any]:
    """Primed states that an attacker with the code, the tenant's name and the prompt, but no secret, can make."""
    own = KeyBuffer.random(KEY_BYTES)
    guesses = [
        bytes(32),
        hashlib.sha256(info).digest(),
        hashlib.sha256(b"acme").digest(),
        b"\xff" * 32,
        bytes(own.view()),
    ]
    keys = [*guesses, *(hmac.new(key, info + b"\x01", "sha256").digest() for key in guesses)]
    return [
        hashlib.sha256(),
        hashlib.blake2b(digest_size=32),
        *(hashlib.blake2b(key=k, digest_size=32) for k in keys),
    ]


def _guess(world: World, prompts: list[Any], count: int) -> tuple[int, int]:
    """(keys computed, those that exist) by the attacker's formulas over the victim's own prompts."""
    cached = _cached_keys(world)
    assert cached
    spec = DomainSpec(
        scope=ScopeKind.TENANT,
        issuer=ISSUER,
        tenant="acme",
        classification="low",
        model=model().digest,
        key_epoch=1,
    )
    states = _formulas(spec.info)
    computed = matches = 0
    for prompt in itertools.cycle(prompts):
        data = prompt.tobytes()
        for primed in states:
            state = primed.copy()
            for at in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
                state.update(data[at : at + 4 * BLOCK])
                computed += 1
                matches += state.digest() in cached
        if computed >= count:
            return computed, matches
        states = _formulas(spec.info)
    raise AssertionError


def _prompts() -> list[Any]:
    random = Random(11)
    return [tokens(random, 20 * BLOCK + 1) for _ in range(20)]


def _check_unpredictable(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(table())
    for prompt in _prompts():
        world.ask("acme", prompt)
    computed, found = _guess(world, _prompts(), count)
    assert computed >= count and found == 0
    monkeypatch.setattr(
        "kvcustody.governance.keys.domain_key_cache.DomainKeys.state", lambda self, spec: hashlib.sha256()
    )
    control = World(table())
    for prompt in _prompts():
        control.ask("acme", prompt)
    cached = _cached_keys(control)
    plain = {hashlib.sha256(p[: at * BLOCK].tobytes()).digest() for p in _prompts() for at in range(1, 21)}
    assert cached and cached <= plain, "void: unsalted keys must all be computable"


def test_keys_cannot_be_computed_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A11, small: 20,000 computed keys of prompts known to be cached."""
    _check_unpredictable(20_000, monkeypatch)


@pytest.mark.soak
def test_unpredictable_keys_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A11, full: 10^6 computed keys."""
    _check_unpredictable(1_000_000, monkeypatch)


def test_one_root_gives_equal_keys_and_two_roots_none() -> None:
    """A11: two Governors over one store and root key agree on every key; with roots of their own on none."""
    store, root = MemoryKeyStore(), RootKeyWrapping(KeyBuffer.random(KEY_BYTES))
    sets = []
    for own in (False, False, True):
        world = World(table())
        if not own:
            world = World(table(), keyring=Keyring(store, root, world.clock))
        for prompt in _prompts():
            world.ask("acme", prompt)
        sets.append(_cached_keys(world))
    assert sets[0] == sets[1] and not sets[0] & sets[2]
