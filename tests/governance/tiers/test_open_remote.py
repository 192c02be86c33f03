"""What settings name a store beyond the machine: what is wrong is said with the setting, and no secret is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.open_tiers import tier_names, tier_plan
from kvcustody.governance.tiers.stores.open_remote import RemotePlan, open_remote
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.governance.offload_world import POLICY, TOKENS, World, prompt
from standins.governance.store_servers import KEY, MOST, S3Server, StoreServer, ValkeyServer, absent

S3 = {"remote_tier_url": "s3://kv-objects/fleet", "remote_tier_bytes": 1 << 30, "worker_name": "gpu-1"}


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return load_settings(database_url=f"sqlite:///{tmp_path / 'ledger.db'}", **changes)


def test_what_is_set_is_what_is_opened(tmp_path: Path) -> None:
    chosen = settings(tmp_path, **S3, remote_tier_labels="region=eu, purpose=chat, purpose=files")
    plan = tier_plan(chosen)
    assert plan is not None and plan.remote is not None and tier_names(chosen) == ["remote"]
    assert plan.remote.place == {"region": ("eu",), "purpose": ("chat", "files")}
    assert plan.remote.timeout_seconds == 1.0 and plan.remote.capacity_bytes == 1 << 30
    assert tier_plan(settings(tmp_path)) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_tier_bytes": 0}, "setting `remote_tier_bytes`"),
        ({"worker_name": "worker-0"}, "setting `worker_name`"),
    ],
)
def test_half_of_it_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tier_plan(settings(tmp_path, **(S3 | changes)))


URLS = [
    ("ftp://there/x", "another scheme"),
    ("s3://", "not a store's address"),
    ("s3://kv-objects/a b", "characters other"),
    ("s3://kv-objects/x?y=1", "not a store's address"),
    ("valkeys://there/fleet", "no number of a database"),
    ("valkeys://user:hush@there/0/fleet", "has a password in it"),
    ("valkey://there/0/fleet", "is in clear"),
    ("valkeys://there:port/0", "no address"),
]


@pytest.mark.parametrize(("url", "says"), URLS)
def test_a_wrong_address_is_said_with_its_setting(url: str, says: str) -> None:
    if why := absent("valkey"):
        pytest.skip(why)
    with pytest.raises(ConfigError, match=says) as said:
        open_remote(RemotePlan(url, 1 << 20), worker="w", object_bytes_max=100, clock=SystemClock())
    assert "hush" not in str(said.value)


def test_a_secret_is_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    plan = RemotePlan(str(S3["remote_tier_url"]), 1 << 20, "https://there.example", secret_path=path)

    def opened() -> None:
        open_remote(plan, worker="w", object_bytes_max=100, clock=SystemClock()).close()

    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        opened()
    path.write_text("one two")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        opened()
    path.chmod(0o600)
    if not absent("s3"):
        opened()
    path.write_text("alone")
    with pytest.raises(ConfigError, match="a key's id and its secret") as said:
        opened()
    assert "alone" not in str(said.value)


@pytest.mark.parametrize("kind", MOST)
def test_it_opens_a_real_one(tmp_path: Path, server: Callable[[str], StoreServer], kind: str) -> None:
    there, path = server(kind), tmp_path / "secret"
    path.write_text(f"{KEY.id} {KEY.secret.decode()}\n")
    path.chmod(0o600)
    if isinstance(there, S3Server):
        plan = RemotePlan(f"s3://kv-objects/{tmp_path.name}", 1 << 20, there.endpoint, secret_path=path)
    else:
        assert isinstance(there, ValkeyServer)
        plan = RemotePlan(f"valkey://127.0.0.1:{there.port}/0/{tmp_path.name}", 1 << 20)
    plan = plan._replace(timeout_seconds=10)
    store = open_remote(plan, worker="w", object_bytes_max=1000, clock=SystemClock())
    name = bytes(range(32))
    into = store.prepare_store(name, 1000)
    assert into is not None
    into[:] = b"x" * 1000
    store.start_store(name)
    assert store.complete_store(name) and [one.name for one in store.page(b"", 9)] == [name]
    other = open_remote(plan, worker="w", object_bytes_max=1000, clock=SystemClock(), shard=1)
    assert other.page(b"", 9) == [], "another shard's objects are another store's"
    assert store.delete([name]).objects == 1 and store.page(b"", 9) == []
    other.close()
    store.close()


class RemoteWorld(World):
    """A worker with a tier in a real store, under this policy of offloading."""

    def __init__(self, folder: Path, offload: str, **said: object) -> None:
        self.offload, self.said = offload, said
        super().__init__(folder, "")

    def open(self) -> None:
        self.policy = POLICY.replace("tiers: [host, nvme]", f"tiers: {self.offload}")
        if "match" in self.offload or "labels" in self.said:
            self.policy += LABELS
            self.policy = self.policy.replace("acme: {", "acme: {labels: {region: eu, purpose: chat}, ")
        self.set |= {name: value for name, value in self.said.items() if name != "labels"}
        super().open()


LABELS = "labels: {region: [eu, us], purpose: [chat, files]}\n"


def test_a_policy_of_remote_alone_needs_a_store(tmp_path: Path) -> None:
    """Where another tier may take it, lint and the log say it."""
    says = "setting `remote_tier_url`: the policy offloads to `remote` alone"
    with pytest.raises(ConfigError, match=says):
        RemoteWorld(tmp_path, "[remote]")
    with pytest.raises(ConfigError, match=says):
        RemoteWorld(tmp_path, "[remote]", host_tier_bytes=1 << 20)
    world = RemoteWorld(tmp_path, "[host, remote]", host_tier_bytes=1 << 20)
    with world.worker:
        assert absent_stores(world) == 0
        alone = world.policy.replace("tiers: [host, remote]", "tiers: [remote]")
        activate(world, alone, 2)
        assert absent_stores(world) == 1, "a later revision is followed, and the worker reports what it lacks"
        activate(world, world.policy, 3)
        assert absent_stores(world) == 0


def activate(world: World, policy: str, revision: int) -> None:
    table = compile_policy(load_policy(policy, name="later"), revision=revision)
    world.worker.governor.activate(table, actor="olga")


def absent_stores(world: World) -> float:
    """What the worker reports of itself."""
    return world.worker.governor.stats().serving["absent_stores"]


@pytest.mark.parametrize(
    ("labels", "comes"),
    [
        ("region=eu,purpose=chat", True),
        ("region=eu,purpose=files,purpose=chat", True),
        ("region=us,purpose=chat", False),
        ("region=eu,purpose=files", False),
        ("region=eu", False),
        ("", False),
    ],
)
def test_a_worker_stores_where_the_labels_agree_and_brings_it_back(
    tmp_path: Path, server: Callable[[str], StoreServer], labels: str, comes: bool
) -> None:
    """`beta` has no label: it may go anywhere. What came back is checked block by block."""
    there = server("valkey")
    assert isinstance(there, ValkeyServer)
    options = {
        "remote_tier_url": f"valkey://127.0.0.1:{there.port}/0/{tmp_path.name}",
        "remote_tier_bytes": 1 << 20,
        "remote_tier_labels": labels,
        "worker_name": "gpu-1",
        "labels": True,
    }
    world = RemoteWorld(tmp_path, "[remote]", **options)
    with world.worker:
        assert world.serve("acme", prompt(1, 8)) == 0 == world.serve("beta", prompt(2, 8))
        world.crowd()
        [tier] = world.tiers
        assert tier.name == "remote"
        back = world.serve("acme", prompt(1, 8))
        assert (back >= 4 * TOKENS) is comes
        world.crowd(1)
        assert world.serve("beta", prompt(2, 8)) >= 4 * TOKENS, "the control: no label binds it"
