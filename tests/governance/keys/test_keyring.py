"""The keyring R1-R5, its store S1-S4, primed states H1-H4; red-team cases A11 and E5."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError
from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner, ScopeKind, tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping, open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from standins import LIBRARY
from standins.governance.memory_scan import copies

ACME = tenant_owner("idp", "acme")
GLOBEX = tenant_owner("idp", "globex")
VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "domain.json").read_text())

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(LIBRARY)}  # of a process of its own


def _ring(folder: Path, **limits: int) -> Keyring:
    port = open_wrapping("generated", folder / "root.key")
    return Keyring(FileKeyStore(folder / "keys.json"), port, VirtualClock(), **limits)


def _spec(tenant: str = "acme", epoch: int = 1, session: str = "s") -> DomainSpec:
    return DomainSpec(
        scope=ScopeKind.SESSION,
        issuer="idp",
        tenant=tenant,
        session=session,
        classification="internal",
        model=bytes(32),
        key_epoch=epoch,
    )


def _block_key(ring: Keyring, spec: DomainSpec, tokens: bytes = b"prefix") -> str:
    state = ring.domains.state(spec).copy()
    state.update(tokens)
    return state.hexdigest()


def test_first_use_makes_an_epoch_and_says_so_once(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    assert ring.current(ACME) is None
    facts = ring.ensure([ACME, GLOBEX, ACME])
    assert [(fact.kind, fact.owner, fact.epoch) for fact in facts] == [
        ("created", ACME, 1),
        ("created", GLOBEX, 1),
    ]
    assert ring.ensure([ACME, GLOBEX]) == ()
    assert ring.current(ACME) == 1 and ring.owners() == (ACME, GLOBEX)


def test_tenants_domains_and_epochs_have_unrelated_keys(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME, GLOBEX])
    ring.rotate(ACME)
    specs = [_spec(), _spec("globex"), _spec(epoch=2), _spec(session="t")]
    assert len({_block_key(ring, spec) for spec in specs}) == len(specs)


def test_the_state_is_kept_and_is_not_changed_by_its_copies(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    first = _block_key(ring, _spec())
    assert ring.domains.state(_spec()) is ring.domains.state(_spec())
    assert _block_key(ring, _spec()) == first
    with KeyBuffer() as key:
        ring.domains.fill(_spec(), key)
        assert hashlib.blake2b(b"prefix", key=key.view(), digest_size=32).hexdigest() == first


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_committed_derivation_vectors(tmp_path: Path, vector: dict[str, Any]) -> None:
    """The derivation itself is part of the format: secret and info in, domain key out."""
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    ring._secret(ACME, 1).writable()[:] = bytes.fromhex(vector["secret"])
    with KeyBuffer() as key:
        ring.derive(ACME, 1, bytes.fromhex(vector["info"]), key)
        assert bytes(key.view()).hex() == vector["key"]


OTHER_PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_keyring as t
ring = t._ring(Path(sys.argv[2]))
print(t._block_key(ring, t._spec()))
"""


def test_two_processes_with_one_root_derive_equal_keys_and_no_other_does(tmp_path: Path) -> None:
    """Equal with the same root and store; none of 5,000 guesses is right without them."""
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    real = {_block_key(ring, _spec(session=f"s{i}")) for i in range(50)} | {_block_key(ring, _spec())}
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", OTHER_PROCESS, here, str(tmp_path)]
    other = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert other.stdout.strip() == _block_key(ring, _spec())

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stranger = _ring(elsewhere)
    stranger.ensure([ACME])
    assert real.isdisjoint(_guesses(5_000))
    assert real.isdisjoint({_block_key(stranger, _spec(session=f"s{i}")) for i in range(50)})

    public = [_spec(session=f"s{i}") for i in range(50)]
    victim = {hashlib.sha256(spec.info + b"prefix").hexdigest() for spec in public}  # the control: no secret
    attacker = {hashlib.sha256(spec.info + b"prefix").hexdigest() for spec in public}
    assert victim == attacker


def _guesses(count: int) -> set[str]:
    """What an attacker who knows tenant, tokens and code, but no secret, can compute."""
    random_ = random.Random(11)
    keys = [bytes(32), b"acme".ljust(32, b"\x00"), _spec().info[:32], hashlib.sha256(b"acme").digest()]
    keys += [random_.randbytes(32) for _ in range(count - len(keys))]
    return {hashlib.blake2b(b"prefix", key=key, digest_size=32).hexdigest() for key in keys}


def test_rotation_keeps_the_old_epoch_readable_until_it_is_destroyed(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    old = _block_key(ring, _spec())
    fact = ring.rotate(ACME)
    assert (fact.kind, fact.epoch, ring.current(ACME)) == ("rotated", 2, 2)
    assert ring.epochs(ACME) == (1, 2) and _block_key(ring, _spec()) == old
    receipt = ring.destroy(ACME, 1)
    assert receipt.fact[:3] == ("destroyed", ACME, 1)
    assert (receipt.wrapped_copies, receipt.buffers_wiped, receipt.states_dropped) == (1, 1, 1)
    with pytest.raises(KeyringError, match="does not exist or is destroyed"):
        ring.domains.state(_spec())
    assert ring.epochs(ACME) == (2,)
    assert _ring(tmp_path).epochs(ACME) == (2,)
    with pytest.raises(KeyringError):
        ring.destroy(ACME, 1)
    with pytest.raises(KeyringError, match="has no key epoch"):
        ring.rotate(GLOBEX)


def test_a_destroyed_epoch_number_is_never_given_again(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    ring.destroy(ACME, 1)
    assert ring.current(ACME) is None
    (fact,) = _ring(tmp_path).ensure([ACME])
    assert fact.epoch == 2


def test_destruction_elsewhere_reaches_this_process(tmp_path: Path) -> None:
    here, there = _ring(tmp_path), _ring(tmp_path)
    here.ensure([ACME])
    there.refresh()
    _block_key(there, _spec())
    here.destroy(ACME, 1)
    there.refresh()
    assert len(there.domains) == 0
    with pytest.raises(KeyringError):
        there.domains.state(_spec())


def test_two_processes_making_epochs_lose_none(tmp_path: Path) -> None:
    ring, other = _ring(tmp_path), _ring(tmp_path)
    ring.ensure([ACME])
    other.ensure([GLOBEX])
    assert other.ensure([ACME]) == ()
    ring.refresh()
    assert ring.owners() == (ACME, GLOBEX)
    assert _block_key(ring, _spec()) == _block_key(other, _spec())


def test_the_change_count_rises_with_every_beginning_and_end_of_an_epoch(tmp_path: Path) -> None:
    ring, other = _ring(tmp_path), _ring(tmp_path)
    seen = [ring.changes]
    for act in (
        lambda: ring.ensure([ACME]),
        lambda: ring.rotate(ACME),
        lambda: ring.destroy(ACME, 1),
        lambda: (other.ensure([GLOBEX]), ring.refresh()),
    ):
        act()
        seen.append(ring.changes)
        ring.ensure([ACME])
        ring.refresh()
        assert ring.changes == seen[-1]
    assert seen == sorted(set(seen))


def test_a_store_that_cannot_be_written_still_ends_the_epoch_here(tmp_path: Path, monkeypatch: Any) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    _block_key(ring, _spec())
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(KeyringError, match=r"cannot be written \(No space left on device\); nothing was changed"):
        ring.destroy(ACME, 1)
    with pytest.raises(KeyringError):
        ring.domains.state(_spec())
    assert ring.current(ACME) is None
    monkeypatch.undo()
    assert _ring(tmp_path).epochs(ACME) == (1,)
    assert ring.destroy(ACME, 1).wrapped_copies == 1


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")


CRASH = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_keyring as t
left = [int(sys.argv[3])]
def dying(function):
    def call(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return function(*arguments, **named)
    return call
ring = t._ring(Path(sys.argv[2]))
for name in ("fsync", "pwrite"):
    setattr(os, name, dying(getattr(os, name)))
Path.replace = dying(Path.replace)
Path.unlink = dying(Path.unlink)
ring.rotate(t.ACME)
print("acknowledged")
"""


def test_a_crash_at_any_point_of_a_rotation_leaves_a_readable_store(tmp_path: Path) -> None:
    """Killed before each file operation in turn; no key is lost."""
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    before = _block_key(ring, _spec())
    died = 0
    for step in range(12):
        known = ring.epochs(ACME)
        command = [sys.executable, "-c", CRASH, str(Path(__file__).parent), str(tmp_path), str(step)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)
        ring.refresh()
        assert _block_key(ring, _spec()) == before
        assert set(ring.epochs(ACME)) - set(known) <= {max(known) + 1}
        for epoch in ring.epochs(ACME):
            _block_key(ring, _spec(epoch=epoch))
        if done.returncode == 0:
            assert ring.current(ACME) == max(known) + 1
            break
        assert done.returncode == 9, done.stderr
        died += 1
    assert died >= 5 and done.stdout == "acknowledged\n"


def test_a_destroyed_epochs_wrapped_copy_leaves_the_replaced_file_too(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    with (tmp_path / "keys.json").open("rb") as replaced:
        ring.destroy(ACME, 1)
        assert set(replaced.read()) == {0}


HOLDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_keyring as t
ring = t._ring(Path(sys.argv[2]))
state = ring.domains.state(t._spec())
running = state.copy()
running.update(bytes(4096))
running.digest()
del state, running
leak = bytes(ring._secret(t.ACME, 1).view()) if sys.argv[3] == "copying" else None
print("ready", flush=True)
sys.stdin.readline()
ring.destroy(t.ACME, 1)
print("destroyed", flush=True)
sys.stdin.readline()
"""


def _copies_around_destroy(folder: Path, how: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Copies of (epoch secret, domain key) in another process, before and after it destroys the epoch."""
    ring = _ring(folder)
    ring.ensure([ACME])
    with KeyBuffer() as key:
        ring.domains.fill(_spec(), key)
        needles = bytes(ring._secret(ACME, 1).view()), bytes(key.view())
    command = [sys.executable, "-c", HOLDER, str(Path(__file__).parent), str(folder), how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = tuple(copies(process.pid, needle) for needle in needles)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "destroyed\n"
        after = tuple(copies(process.pid, needle) for needle in needles)
        process.stdin.write("\n")
        process.stdin.flush()
    return before, after  # type: ignore[return-value]


def test_no_key_is_left_in_memory_after_destruction(tmp_path: Path) -> None:
    """E5, from outside the process: one secret and one primed state before, nothing after; `bytes` stay."""
    for how in ("in-place", "copying"):
        (tmp_path / how).mkdir()
    before, after = _copies_around_destroy(tmp_path / "in-place", "in-place")
    assert before == (1, 1) and after == (0, 0)
    _, leaked = _copies_around_destroy(tmp_path / "copying", "copying")
    assert leaked[0] >= 1


def test_rewrapping_moves_every_epoch_to_another_root_key(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME, GLOBEX])
    before = _block_key(ring, _spec())
    replacement = RootKeyWrapping(KeyBuffer.random())
    assert [fact.kind for fact in ring.rewrap(replacement)] == ["rewrapped", "rewrapped"]
    ring.close()
    assert _block_key(ring, _spec()) == before
    with pytest.raises(KeyringError, match="does not open under this root key"):
        _ring(tmp_path).domains.state(_spec())


def test_the_caches_are_bounded_and_an_owner_evicts_its_own_states_first(tmp_path: Path) -> None:
    """One tenant that invents 200 sessions does not push another's state out."""
    ring = _ring(tmp_path, states_max=50, states_per_owner_max=20, secrets_max=1)
    ring.ensure([ACME, GLOBEX])
    kept = ring.domains.state(_spec("globex"))
    for i in range(200):
        ring.domains.state(_spec(session=f"s{i}"))
    assert len(ring.domains) == 21
    assert ring.domains.state(_spec("globex")) is kept
    assert _block_key(ring, _spec()) == _block_key(ring, _spec())


def test_a_forked_child_starts_without_states_and_derives_the_same_keys(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    expected = _block_key(ring, _spec())
    child = os.fork()
    if child == 0:
        status = 10
        try:
            if len(ring.domains) != 0:
                status = 11
            ring.domains.state(_spec())
            status = 12
        except KeyringError:  # the root key's buffer is empty here: the child must open its own keyring
            status = 0 if _block_key(_ring(tmp_path), _spec()) == expected else 13
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"schema": "kvcustody/keyring@2", "epochs": []}',
        b'{"schema": "kvcustody/keyring@1"}',
        b'{"schema": "kvcustody/keyring@1", "epochs": [{}], "latest": [], "destroyed": []}',
        b'{"schema": "kvcustody/keyring@1", "epochs": [{"kind": "tenant", "issuer": "i", "name": "n", '
        b'"epoch": 1, "wrapped": "?", "created_utc_us": 1}], "latest": [], "destroyed": []}',
    ],
)
def test_a_malformed_store_is_refused_with_one_line(tmp_path: Path, content: bytes) -> None:
    store = tmp_path / "keys.json"
    store.write_bytes(content)
    store.chmod(0o600)
    with pytest.raises(KeyringError, match="restore a backup") as caught:
        _ring(tmp_path)
    assert "\n" not in str(caught.value) and store.read_bytes() == content


def test_a_store_open_to_others_is_refused(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    (tmp_path / "keys.json").chmod(0o644)
    with pytest.raises(KeyringError, match="mode `0644`"):
        _ring(tmp_path)


def test_the_store_holds_no_secret(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ring.ensure([ACME])
    secret = bytes(ring._secret(ACME, 1).view())
    stored = (tmp_path / "keys.json").read_bytes()
    assert secret not in stored and secret.hex().encode() not in stored
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


def test_a_foreign_wrapped_row_does_not_open(tmp_path: Path) -> None:
    """E3 in small: rows exchanged between tenants in the store fail to open."""
    ring = _ring(tmp_path)
    ring.ensure([ACME, GLOBEX])
    store = FileKeyStore(tmp_path / "keys.json")
    document = store.load()
    epochs = document.epochs
    epochs[ACME, 1], epochs[GLOBEX, 1] = epochs[GLOBEX, 1], epochs[ACME, 1]
    store.save(document)
    with pytest.raises(KeyringError, match="does not open under this root key"):
        _ring(tmp_path).domains.state(_spec())


def test_owner_names_are_readable_in_messages() -> None:
    assert str(ACME) == "tenant `idp` `acme`" and str(KeyOwner("group", "", "g")) == "group `g`"
