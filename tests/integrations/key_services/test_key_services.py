"""Real key services behind the wrapping port: what they wrap, how often they are asked, what a destroyed key ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.errors import ConfigError, KeyringError, KeyServiceUnavailable
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import KeyOwner, tenant_owner
from kvcustody.governance.keys import service_wrapping
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.root_key_wrapping import open_wrapping as open_root
from kvcustody.governance.keys.service_wrapping import ServiceWrapping
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.integrations.key_services.document import open_wrapping
from standins.governance.sealed_objects import World
from standins.governance.tier_place import Place, keys_of
from standins.integrations.key_services_world import (
    BAO,
    BAO_ABSENT,
    SOFT_HSM,
    SOFT_HSM_ABSENT,
    OpenBao,
    soft_hsm,
)
from standins.waiting import until

ACME, LABS = tenant_owner("idp", "acme"), tenant_owner("idp", "labs")
NOW_US = 1_790_000_000_000_000
bao_only = pytest.mark.skipif(BAO is None, reason=BAO_ABSENT)
hsm_only = pytest.mark.skipif(SOFT_HSM is None, reason=SOFT_HSM_ABSENT)


class Deployment(NamedTuple):
    """A folder of keys, and the document of the service that wraps them."""

    folder: Path
    document: Path

    def port(self, root: str = "root.wrapped") -> ServiceWrapping:
        return open_wrapping(self.document, self.folder / root)

    def ring(self, port: ServiceWrapping | RootKeyWrapping | None = None) -> Keyring:
        clock = VirtualClock(utc_us=NOW_US)
        return Keyring(FileKeyStore(self.folder / "keys.json"), port or self.port(), clock)


@pytest.fixture(scope="module")
def bao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    server = OpenBao(tmp_path_factory.mktemp("bao"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def hsm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with soft_hsm(tmp_path_factory.mktemp("hsm")) as document:
        yield document


@pytest.fixture(
    params=[pytest.param("bao", marks=bao_only), pytest.param("hsm", marks=hsm_only)],
)
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Deployment:
    if request.param == "hsm":
        return Deployment(tmp_path, request.getfixturevalue("hsm"))
    return on_bao(request.getfixturevalue("bao"), tmp_path)


def on_bao(server: OpenBao, folder: Path, **how: int) -> Deployment:
    return Deployment(folder, server.document(folder / "service.yaml", **how))


def key_of(ring: Keyring, owner: KeyOwner, epoch: int) -> bytes:
    with KeyBuffer() as key:
        ring.derive(owner, epoch, b"use", key)
        return bytes(key.view())


def test_epochs_open_in_another_process_and_under_no_other_deployment(deployment: Deployment, tmp_path: Path) -> None:
    ring = deployment.ring()
    ring.ensure([ACME, LABS])
    assert key_of(deployment.ring(), ACME, 1) == key_of(ring, ACME, 1) != key_of(ring, LABS, 1)
    other = deployment.ring(deployment.port("other.wrapped"))
    with pytest.raises(KeyringError):
        key_of(other, ACME, 1)


def test_a_wrap_that_is_moved_to_another_owner_does_not_open(deployment: Deployment) -> None:
    ring = deployment.ring()
    ring.ensure([ACME, LABS])
    store = FileKeyStore(deployment.folder / "keys.json")
    document = store.load()
    document.epochs[ACME, 1], document.epochs[LABS, 1] = document.epochs[LABS, 1], document.epochs[ACME, 1]
    store.save(document)
    with pytest.raises(KeyringError):
        key_of(deployment.ring(), ACME, 1)


def test_the_key_of_a_destroyed_epoch_is_gone_so_that_a_backup_opens_no_more(deployment: Deployment) -> None:
    ring = deployment.ring()
    ring.ensure([ACME, LABS])
    backup = (deployment.folder / "keys.json").read_bytes()
    receipt = ring.destroy(ACME, 1)
    assert receipt.fact.in_service == "owed"
    (ended,) = ring.end_in_service()
    assert (ended.owner, ended.epoch, ended.in_service) == (ACME, 1, "gone")
    assert ring.end_in_service() == (), "once"
    (deployment.folder / "keys.json").write_bytes(backup)
    restored = deployment.ring()
    with pytest.raises(KeyringError):
        key_of(restored, ACME, 1)
    assert key_of(restored, LABS, 1) == key_of(ring, LABS, 1)


def test_control_with_the_key_still_there_the_backup_opens(deployment: Deployment) -> None:
    ring = deployment.ring()
    ring.ensure([ACME])
    secret, backup = key_of(ring, ACME, 1), (deployment.folder / "keys.json").read_bytes()
    ring.destroy(ACME, 1)  # and nobody asks the service
    (deployment.folder / "keys.json").write_bytes(backup)
    assert key_of(deployment.ring(), ACME, 1) == secret


def test_what_a_crash_left_owed_is_done_by_the_next_process(deployment: Deployment) -> None:
    ring = deployment.ring()
    ring.ensure([ACME])
    ring.destroy(ACME, 1)
    assert [fact.in_service for fact in deployment.ring().end_in_service()] == ["gone"]


class Counted:
    """Counts what is asked of a service."""

    def __init__(self, service: object) -> None:
        self._service, self.asked = service, 0

    def __getattr__(self, name: str) -> object:
        self.asked += name in ("wrap", "unwrap", "make_key", "end_key")
        return getattr(self._service, name)


def test_a_process_asks_once_for_its_root_and_once_for_each_epoch_whatever_it_seals(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.ring().ensure([ACME, LABS])
    port = deployment.port()
    counted = port._service = Counted(port._service)  # type: ignore[assignment]
    ring = deployment.ring(port)
    shred = ShredKeys.open(deployment.folder / "shred.keys", port, VirtualClock(utc_us=NOW_US))
    subjects = [shred.of_subject(b"subject %d" % number) for number in range(20)]
    with KeyBuffer() as key:
        for number in range(2_000):
            ring.derive((ACME, LABS)[number % 2], 1, b"object %d" % number, key)
            assert shred.secret(subjects[number % 20].id).filled
    assert counted.asked == 2, "one for each domain epoch; subjects, buckets and objects cost none"
    shred.close()


@bao_only
def test_a_service_that_is_away_stops_tiers_after_its_bound_and_opened_epochs_go_on(
    bao: OpenBao, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = on_bao(bao, tmp_path, timeout_ms=200, outage_seconds=60)
    port = deployment.port()
    ring = deployment.ring(port)
    ring.ensure([ACME, LABS])
    ring.destroy(LABS, 1)
    shred = ShredKeys.open(tmp_path / "shred.keys", port, VirtualClock(utc_us=NOW_US))
    keys, secret = SealKeys(ring, shred), key_of(ring, ACME, 1)
    keys.look()
    now = service_wrapping.time.monotonic()
    bao.signal(signal.SIGSTOP)
    try:
        assert ring.end_in_service() == (), "it is asked again later"
        with pytest.raises(KeyServiceUnavailable):
            ring.ensure([tenant_owner("idp", "new")])
        monkeypatch.setattr(service_wrapping.time, "monotonic", lambda: now + 61)
        with pytest.raises(KeyServiceUnavailable, match="unreachable for too long"):
            keys.look()
        assert key_of(ring, ACME, 1) == secret, "what is on the device is served on"
    finally:
        bao.signal(signal.SIGCONT)
        monkeypatch.undo()
    service_wrapping.time.sleep(service_wrapping._PAUSE_SECONDS)
    assert [fact.in_service for fact in ring.end_in_service()] == ["gone"]
    keys.look()
    shred.close()


@bao_only
def test_copies_end_as_ever_while_a_service_is_away_for_too_long(
    bao: OpenBao, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Erased, due, or not permitted any more; what is none of these has no evidence of an end, and comes back."""
    deployment = on_bao(bao, tmp_path, timeout_ms=20_000, outage_seconds=60)  # being away is said by the clock
    port = deployment.port()
    place = Place(tmp_path, "nvme", world=World(tmp_path, port))
    acme, beta = place.label("acme"), place.label("beta")
    assert [place.keep(label, "p", 4) for label in (acme, beta)] == [4, 4]
    assert place.keep(beta, "short", 4, lives_us=1_000_000) == 4
    kept = place.tier.lookup(beta, keys_of("p", 4), 0)
    now = service_wrapping.time.monotonic()
    with monkeypatch.context() as away:
        away.setattr(service_wrapping.time, "monotonic", lambda: now + 61)
        away.setattr(port._probes, "submit", lambda _: None)  # else the service, which is there, answers
        assert place.bring(beta, "p", 4) == 0, "nothing is opened"
        assert place.tier.load(beta, keys_of("p", 4), 0, kept, lambda *_: None) == []
        assert place.tier.erase("e", Selector("acme"), 0).done
        place.world.clock.advance(2_000_000)
        assert place.tier.expire() == 1
        place.tier.narrow()
        assert [one.cause for one in place.events() if one.step == "ended"] == ["erased", "ceiling"]
        assert len(place.tier.objects()) == 1
    assert place.bring(beta, "p", 4) == 4 and place.bring(acme, "p", 4) == 0
    place.tier.close()
    place.staging.close()
    place.world.close()


@bao_only
@pytest.mark.soak
@pytest.mark.parametrize(("away", "outage"), [(12, 4), (600, 200)])
def test_tiers_stop_while_a_service_is_away_for_long_and_go_on_when_it_is_back(
    bao: OpenBao, tmp_path: Path, away: int, outage: int
) -> None:
    """In real time, with a sealed tier: its copies outlive an outage that is longer than the bound."""
    deployment = on_bao(bao, tmp_path, timeout_ms=500, outage_seconds=outage)
    port = deployment.port()
    place = Place(tmp_path, "nvme", world=World(tmp_path, port))
    place.allowed = {"internal": 3_600_000_000}
    acme = place.label("acme")
    lives = {"lives_us": 3_600_000_000}
    clock = service_wrapping.time
    assert place.keep(acme, "p", 8, **lives) == 8 == place.bring(acme, "p", 8)
    bao.signal(signal.SIGSTOP)
    began, answers = clock.monotonic(), list[tuple[float, int]]()
    try:
        while (at := clock.monotonic() - began) < away:
            place.tier.expire()
            answers.append((at, place.bring(acme, "p", 8)))
            clock.sleep(away / 60)
    finally:
        bao.signal(signal.SIGCONT)
    assert {blocks for at, blocks in answers if at < outage / 2} == {8}, "within the bound tiers go on"
    assert {blocks for at, blocks in answers if at > 2 * outage} == {0}, "beyond it nothing is opened"
    until(lambda: place.bring(acme, "p", 8) == 8, 60)
    assert place.keep(acme, "q", 4, **lives) == 4 == place.bring(acme, "q", 4)
    assert place.orphans() == []
    place.tier.close()
    place.staging.close()
    place.world.close()


@bao_only
def test_a_refused_token_is_an_outage_and_says_so(bao: OpenBao, tmp_path: Path) -> None:
    deployment = on_bao(bao, tmp_path)
    (tmp_path / "wrong").write_text("no such token")
    document = deployment.document.read_text().replace(f"{bao.folder}/token", "wrong")
    deployment.document.write_text(document)
    with pytest.raises(KeyServiceUnavailable, match="403 Forbidden"):
        deployment.port()


@bao_only
def test_names_in_the_service_tell_no_tenant(bao: OpenBao, tmp_path: Path) -> None:
    before = set(bao.keys())
    on_bao(bao, tmp_path).ring().ensure([ACME])
    new = set(bao.keys()) - before
    assert len(new) == 2 and all("acme" not in name for name in new), "the root's and the epoch's"


def test_keys_move_from_a_root_key_into_a_service_and_a_call_that_was_cut_goes_on(
    deployment: Deployment,
) -> None:
    root = RootKeyWrapping(KeyBuffer.random(KEY_BYTES))
    ring = deployment.ring(root)
    ring.ensure([tenant_owner("idp", f"t{number}") for number in range(5)])
    secrets = [key_of(ring, owner, 1) for owner in ring.owners()]
    port, saved = deployment.port(), []

    def cut(done: int, of: int) -> None:
        saved.append((done, of))
        if len(saved) == 2:
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcustody.governance.keys.keyring.REWRAP_BATCH", 2)
        with pytest.raises(InterruptedError):
            ring.rewrap(port, cut)
        assert saved == [(2, 5), (4, 5)]
        assert len(deployment.ring(root).rewrap(port)) == 1, "four were moved before"
    moved = deployment.ring(port)
    assert [key_of(moved, owner, 1) for owner in moved.owners()] == secrets
    with pytest.raises(KeyringError):
        key_of(deployment.ring(root), ACME._replace(name="t0"), 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("service: openbao\n  address: http://bao.example:8200\n  token_path: t", "unencrypted over a network"),
        ("service: openbao\n  address: bao\n  token_path: t", "is no address"),
        ("service: pkcs12\n  token_path: t", "service"),
        ("service: pkcs11\n  library: /x\n  token: t", "pin_path"),
    ],
)
def test_a_document_that_is_wrong_is_refused_by_its_field(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(f"key_service:\n  {text}\n")
    with pytest.raises(ConfigError, match=expected):
        open_wrapping(path, tmp_path / "root.wrapped")
    assert not (tmp_path / "root.wrapped").exists()


def test_the_command_moves_keys_into_a_service_and_between_roots_and_ends_the_old_ones(
    deployment: Deployment,
) -> None:
    folder = deployment.folder
    store, shred, old = folder / "keys.json", folder / "shred.keys", folder / "root.key"
    ring = deployment.ring(open_root("generated", old))
    ring.ensure([ACME])
    keys = ShredKeys.open(shred, ring._port, VirtualClock(utc_us=NOW_US))
    subject, secret = keys.of_subject(b"ann").id, key_of(ring, ACME, 1)
    sealed = bytes(keys.secret(subject).view())
    keys.close()
    into = ["--to-service", deployment.document, "--shred-keys", shred, "--end-old", "--json"]
    assert cli("keys", "rewrap", store, "--from", old, "--to", folder / "one.wrapped", *into) == {
        **{"path": str(store), "status": "rewrapped", "epochs": 1, "shred_keys": 2, "old_ended": True},
        "old_pending_until": None,
    }
    assert not old.exists()
    backup, backed_root = store.read_bytes(), (folder / "one.wrapped").read_bytes()
    again = ["--from-service", deployment.document, *into]
    assert cli("keys", "rewrap", store, "--from", folder / "one.wrapped", "--to", folder / "two.wrapped", *again)
    port = deployment.port("two.wrapped")
    keys = ShredKeys.open(shred, port, VirtualClock(utc_us=NOW_US))
    assert key_of(deployment.ring(port), ACME, 1) == secret and bytes(keys.secret(subject).view()) == sealed
    keys.close()
    store.write_bytes(backup)
    (folder / "one.wrapped").write_bytes(backed_root)
    with pytest.raises(KeyringError):
        deployment.port("one.wrapped")


def test_the_old_root_is_not_ended_where_shred_keys_would_be_lost_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, old, new = tmp_path / "keys.json", tmp_path / "root.key", tmp_path / "new.key"
    monkeypatch.setenv("KVCUSTODY_SHRED_KEYS_PATH", str(tmp_path / "shred.keys"))
    port = open_root("generated", old)
    Deployment(tmp_path, tmp_path).ring(port).ensure([ACME])
    ShredKeys.open(tmp_path / "shred.keys", port, VirtualClock(utc_us=NOW_US)).close()
    open_root("generated", new)
    result = CliRunner().invoke(app, ["keys", "rewrap", str(store), "--from", str(old), "--to", str(new), "--end-old"])
    assert result.exit_code and "give --shred-keys" in result.output
    assert old.exists() and "kvcustody" in store.read_text()


def cli(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [str(item) for item in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document
