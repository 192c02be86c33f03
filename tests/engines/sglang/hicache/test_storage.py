"""The storage that SGLang's own factory makes, over a host pool of the tests' own: what opens, for whom, until when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from standins.governance.store_servers import StoreServer, ValkeyServer, servers

PAGE_VALUES = 2048
KEYS = [f"{number:064x}" for number in range(4)]
TERMS = {
    "backend_name": "custody",
    "module_path": "kvcustody.integrations.sglang.hicache_storage",
    "class_name": "CustodyStorage",
    "owner": "acme",
    "seconds": 60,
    "size_bytes": 1 << 22,
}
CONFIG = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=False,
    model_name="org/m",
)


def page(number: int) -> torch.Tensor:
    return torch.full((PAGE_VALUES,), 1000.0 + number, dtype=torch.bfloat16)


def opened(
    number: int = 1, *, dtype: torch.dtype = torch.bfloat16, more: dict[str, Any] | None = None, **terms: Any
) -> Any:
    """Storage as HiCache's controller makes it: by the factory, and then the pool."""
    config = dataclasses.replace(CONFIG, extra_config=TERMS | terms, **(more or {}))
    storage = StorageBackendFactory.create_backend("dynamic", config, None)
    storage.register_mem_pool_host(
        SimpleNamespace(
            page_size=16,
            layout="layer_first",
            start_layer=0,
            layer_num=number,
            get_dummy_flat_data_page=lambda: torch.zeros(PAGE_VALUES, dtype=dtype),
        )
    )
    storage.on_host_pools_registered()
    return storage


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("ROOT_KEY", "root.key"), ("KEYRING", "keyring.json"), ("SHRED_KEYS", "shred.keys")):
        monkeypatch.setenv(f"KVCUSTODY_{name}_PATH", str(tmp_path / file))


@pytest.fixture
def tier(tmp_path: Path) -> str:
    return str(tmp_path / "tier")


@pytest.fixture
def open_storage() -> Iterator[Callable[..., Any]]:
    storages: list[Any] = []

    def one(**named: Any) -> Any:
        while storages:  # a folder has one engine at a time
            storages.pop().close()
        storages.append(opened(**named))
        return storages[-1]

    yield one
    for storage in storages:
        storage.close()


def files(tier: str) -> list[Path]:
    """Those that hold a page, by age."""
    found = [path for path in Path(tier).rglob("*") if path.is_file() and path.stat().st_size > PAGE_VALUES]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def found(storage: Any, keys: list[str] = KEYS) -> list[float | None]:
    """What each page begins with; None for a miss."""
    places = [torch.zeros(PAGE_VALUES, dtype=torch.bfloat16) for _ in keys]
    come = storage.batch_get(keys, places)
    for place, one in zip(places, come, strict=True):
        assert one is not None or not place.any(), "a miss writes nothing"
        assert one is None or torch.equal(one, torch.full_like(one, float(one[0])))
    return [None if one is None else float(one[0]) for one in come]


@pytest.mark.parametrize("where", ["host", "files"])
def test_pages_come_back_as_they_were(where: str, tier: str, open_storage: Callable[..., Any]) -> None:
    storage = open_storage(**({"path": tier} if where == "files" else {}))
    assert storage.batch_set(KEYS[:3], [page(n) for n in range(3)])
    assert storage.batch_exists(KEYS) == 3 and storage.exists(KEYS[2]) and not storage.exists(KEYS[3])
    assert found(storage) == [float(page(n)[0]) for n in range(3)] + [None]
    assert storage.set(KEYS[0], page(0)), "it is there already"


def test_what_rests_is_sealed_under_names_that_say_nothing(tier: str, open_storage: Any) -> None:
    storage = open_storage(path=tier)
    storage.set(KEYS[1], page(1))
    clear = page(1).view(torch.uint8).numpy().tobytes()
    (path,) = files(tier)
    assert clear[:32] not in path.read_bytes()
    assert KEYS[1] not in str(path) and "acme" not in str(path) and "org" not in str(path)
    plain = HiCacheFile(CONFIG, str(Path(tier).parent / "plain"))
    assert plain.set(KEYS[1], page(1))
    (control,) = (Path(tier).parent / "plain").glob("*.bin")
    assert clear == control.read_bytes() and KEYS[1] in control.name, "positive control: SGLang's own"


def test_pages_are_their_owners_and_their_weights(tier: str, open_storage: Any) -> None:
    open_storage(path=tier).batch_set(KEYS[:2], [page(0), page(1)])
    assert found(open_storage(path=tier), KEYS[:2]) != [None, None], "control: a restart"
    for other in (
        {"owner": "beta"},
        {"revision": "2"},
        {"more": {"model_name": "org/n"}},
        {"number": 2},
        {"dtype": torch.float16},
    ):
        storage = open_storage(**{"path": tier, **other})
        assert found(storage, KEYS[:2]) == [None, None] and storage.batch_exists(KEYS) == 0, other


def test_what_was_changed_or_moved_does_not_open(tier: str, open_storage: Any) -> None:
    storage = open_storage(path=tier)
    storage.batch_set(KEYS[:3], [page(n) for n in range(3)])
    one, two, three = files(tier)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    data = bytearray(three.read_bytes())
    data[-100] ^= 1
    three.write_bytes(data)
    assert found(storage, KEYS[:3]) == [None] * 3
    assert storage.batch_exists(KEYS) == 0, "what does not open is ended"


def test_clearing_ends_every_page_and_an_older_one_does_not_come_back(tier: str, open_storage: Any) -> None:
    storage = open_storage(path=tier)
    storage.batch_set(KEYS[:2], [page(0), page(1)])
    before = {path: path.read_bytes() for path in files(tier)}
    assert len(before) == 2
    storage.clear()
    assert not files(tier) and storage.batch_exists(KEYS) == 0
    assert storage.set(KEYS[3], page(3)), "it goes on"
    storage.close()
    for path, data in before.items():  # somebody had a copy
        path.write_bytes(data)
    assert found(open_storage(path=tier)) == [None, None, None, float(page(3)[0])]


def test_pages_end_at_their_deadline_while_nobody_asks(tier: str, open_storage: Any) -> None:
    storage = open_storage(path=tier, seconds=1.5)
    storage.set(KEYS[0], page(0))
    assert len(files(tier)) == 1
    until = time.monotonic() + 20
    while files(tier):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert found(storage, KEYS[:1]) == [None]


def test_destroying_the_owners_epoch_ends_all_of_them(tier: str, tmp_path: Path, open_storage: Any) -> None:
    storage = open_storage(path=tier)
    storage.set(KEYS[0], page(0))
    port = open_wrapping("file", tmp_path / "root.key")
    Keyring(FileKeyStore(tmp_path / "keyring.json"), port, SystemClock()).destroy(tenant_owner("sglang", "acme"), 1)
    assert found(storage, KEYS[:1]) == [None] and not storage.exists(KEYS[0])
    assert not storage.set(KEYS[1], page(1))


def test_what_is_no_page_is_not_kept(open_storage: Any) -> None:
    storage = open_storage()
    for wrong in (None, b"bytes", page(0)[:10], torch.zeros(2, PAGE_VALUES)):
        assert not storage.set(KEYS[0], wrong)
    storage.set(KEYS[0], page(0))
    assert storage.get(KEYS[0], page(0)[:10]) is None and storage.get(KEYS[0]) is None


def test_what_cannot_be_kept_apart_is_refused() -> None:
    for several in ({"tp_size": 2}, {"pp_size": 2}, {"attn_cp_size": 2}, {"model_name": None}):
        with pytest.raises(ConfigError, match="hicache storage"):
            opened(more=several)
    for wrong in ({"owner": ""}, {"seconds": 0}, {"seconds": "60"}, {"size_bytes": 0}, {"path": 7}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            opened(**wrong)
    storage = opened()
    with pytest.raises(ConfigError, match="mamba"):
        storage.register_mem_host_pool_v2(None, PoolName.MAMBA)
    storage.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)


def test_engines_of_one_owner_share_a_remote_store(
    valkey: Callable[[str], StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = valkey("valkey")
    assert isinstance(server, ValkeyServer)
    url = f"valkey://127.0.0.1:{server.port}/0/{tmp_path.name}"
    engines = []
    for worker, owner in (("gpu-1", "acme"), ("gpu-2", "acme"), ("gpu-3", "other")):
        monkeypatch.setenv("KVCUSTODY_WORKER_NAME", worker)
        engines.append(opened(url=url, owner=owner))
    first, second, other = engines
    assert first.batch_set(KEYS[:2], [page(0), page(24)])
    assert (second.batch_exists(KEYS), other.batch_exists(KEYS)) == (2, 0)
    assert found(second) == [1000.0, 1024.0, None, None] and found(other) == [None] * 4
    first.clear()
    assert found(second) == [None] * 4 and second.batch_exists(KEYS) == 0
    for engine in engines:
        engine.close()
