"""Each extension point used as a third party would: a distribution of its own, found by its entry points alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest
import torch
import typer
from sqlalchemy import select
from typer.testing import CliRunner

from kvcustody import extensions
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.siem.formats import open_shape
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.errors import ConfigError
from kvcustody.extensions import POINTS, Extension, load
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.worker.engine_worker import EnginePlan, open_engine_worker
from kvcustody.governance.worker.plugins import load_plugins
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

MODEL = tiny_model()
ACME = '''
import typer
from kvcustody.allocator.prefix.eviction_policy import Lru
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.governance.erasure.tier_protocol import TierErased
from kvcustody.governance.keys.root_key_wrapping import open_wrapping

MADE = []

class TwoQueue(Lru):
    name = "two-queue"
    def __init__(self):
        MADE.append("eviction")
    def level(self, node):
        return 1 if node.hits else 0

class ByKey(Lru):
    name = "by-key"
    def level(self, node):
        return node.keys[0]

class Bucket:
    name = "remote"
    def __init__(self, settings):
        MADE.append(f"tier of {settings.worker_name}")
        self.erased = []
    def erase(self, erasure, selector, before_us):
        self.erased.append(erasure)
        return TierErased(0, 0)
    def objects(self): return {}
    def index(self): return {}
    def destroy(self, keys): return 0
    def forget(self, keys): return 0

def key_service(settings):
    MADE.append("wrapping")
    return open_wrapping("generated", settings.keyring_path.with_name("acme.key"))

class CardReader:
    name = "card"
    def __init__(self):
        self.key = SigningKey.generate("card")
    def sign(self, message):
        return self.key.raw(message)

class Terse:
    media_type = "application/x-acme"
    def shape(self, row):
        return {"log": row.log, "idx": row.idx, "acme": row.kind}

app = typer.Typer()
@app.command()
def hello() -> None:
    """Say hello."""
    print("hello from acme")
@app.command()
def bye() -> None:
    """Say bye."""

def engine(deployment):
    from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
    return NativeEngine(deployment)

class Half:
    name = "half"

def fails():
    raise RuntimeError("no card in the reader")
'''
ENTRY_POINTS = """
[kvcustody.commands]
acme = acme_kv:app
[kvcustody.tiers]
bucket = acme_kv:Bucket
[kvcustody.engines]
acme-engine = acme_kv:engine
[kvcustody.eviction_policies]
two-queue = acme_kv:TwoQueue
by-key = acme_kv:ByKey
half = acme_kv:Half
[kvcustody.key_wrapping]
acme-keys = acme_kv:key_service
[kvcustody.signers]
card = acme_kv:CardReader
broken = acme_kv:fails
gone = acme_kv:NoSuchName
[kvcustody.siem_formats]
terse = acme_kv:Terse
"""


def distribution(folder: Path, name: str, version: str, entry_points: str) -> None:
    """What pip leaves of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An installed third-party package; gives the list of what it was asked to make."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "acme_kv.py").write_text(ACME)
    distribution(site, "acme-kv", "1.2", ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    invalidate_caches()
    yield import_module("acme_kv").MADE
    sys.modules.pop("acme_kv", None)


def settings(folder: Path, **changes: object) -> Settings:
    return load_settings(
        **builders.worker_files(folder, Path(__file__).parents[2] / "policies" / "library" / "single-org.yaml"),
        policy_mark_path=folder / "mark",
        **changes,
    )


def memory(blocks: int) -> Memory:
    return TensorMemory.allocate(blocks, TensorSpec(layers=1, kv_heads=1, head_dim=8, dtype=torch.float16))


def recorded_software(folder: Path) -> str:
    engine = open_store(folder / "ledger.db", read_only=True)
    with engine.connect() as connection:
        found = connection.scalar(select(incarnations.c.software))
    engine.dispose()
    return str(found)


def test_every_point_has_an_example_here_and_a_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "build" / "extending.md").read_text()
    for point in POINTS:
        assert f"[{point.group}]" in ENTRY_POINTS and f"`{point.group}`" in page, point.group


def test_a_worker_uses_what_its_settings_name_and_says_so_on_record(tmp_path: Path, acme: list[str]) -> None:
    named = settings(
        tmp_path,
        root_key_source="plugin:acme-keys",
        eviction_policy="plugin:two-queue",
        tiers="plugin:bucket",
    )
    with open_worker(named, MemoryPlan(memory, 64, 1, 1024)) as worker:
        (tier,) = worker.governor.erasures.tiers
        assert tier.name == "remote"
        worker.governor.admit(identify(issuer="idp", tenant="org"), MODEL, list(range(1, 40)))
        assert acme.count("eviction") >= 2, "one to look at, and one for the account that was charged"
        worker.governor.erase(Selector(tenant="org"))
        assert len(tier.erased) == 1  # type: ignore[attr-defined]
    assert {"wrapping", "eviction", "tier of worker-0"} <= set(acme)
    assert (tmp_path / "acme.key").exists() and not (tmp_path / "root.key").exists()
    software = recorded_software(tmp_path)
    for text in (
        "acme-kv 1.2 (key_wrapping: acme-keys)",
        "(eviction_policies: two-queue)",
        "(tiers: bucket)",
    ):
        assert text in software


class Control:
    """An engine without requests: nothing is ever ordered of it."""

    def evict(self, blocks: object) -> None: ...
    def abort(self, request_ids: object, cause: str) -> None: ...
    def withhold(self, blocks: object) -> None: ...
    def wake(self) -> None: ...
    def view(self) -> None: ...


def test_an_engine_that_allocates_by_itself_has_its_tiers_too_and_an_order_of_its_own(
    tmp_path: Path, acme: list[str]
) -> None:
    plan = EnginePlan(64, 16, bytes_per_block=1024)
    with open_engine_worker(settings(tmp_path, tiers="plugin:bucket"), plan, Control()) as worker:  # type: ignore[arg-type]
        (tier,) = worker.port.erasures.tiers
        worker.port.erase(Selector(tenant="org"))
        assert len(tier.erased) == 1  # type: ignore[attr-defined]
    assert "(tiers: bucket)" in recorded_software(tmp_path)
    ordered = settings(tmp_path, eviction_policy="plugin:two-queue")
    with open_engine_worker(ordered, plan, Control()) as worker:  # type: ignore[arg-type]
        assert worker.port.orders_victims and worker.port.pool.ranking is not None
    refused = r"setting `eviction_policy`: `plugin:by-key` cannot order .* IndexError"
    with pytest.raises(ConfigError, match=refused):
        open_engine_worker(settings(tmp_path, eviction_policy="plugin:by-key"), plan, Control())  # type: ignore[arg-type]


def test_what_is_installed_and_not_named_is_neither_loaded_nor_on_record(
    tmp_path: Path, acme: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(extensions.EntryPoint, "load", lambda self: loaded.append(self.name))
    with open_worker(settings(tmp_path), MemoryPlan(memory, 64, 1, 1024)):
        pass
    assert (acme, loaded) == ([], [])
    assert recorded_software(tmp_path).startswith("kvcustody ") and "acme" not in recorded_software(tmp_path)


def test_a_signer_signs(acme: list[str]) -> None:
    signer = open_signer(Path("plugin:card"))
    assert signer.name == "card" and isinstance(signer.key, SigningKey)  # type: ignore[attr-defined]
    assert len(signer.sign(b"kvcustody/test\n")) == 64


def test_leaves_are_told_in_a_shape_of_somebody_elses(acme: list[str]) -> None:
    class Row:
        log, idx, kind = "system", 3, "worker-started"

    shape = open_shape("plugin:terse", "")
    assert shape.media_type == "application/x-acme"
    assert shape.shape(Row()) == {"log": "system", "idx": 3, "acme": "worker-started"}  # type: ignore[arg-type]


def test_the_kit_runs_over_an_engine_of_somebody_elses(acme: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from kvcustody.testkit.conformance.command import conformance

    with pytest.raises(typer.Exit) as ended:
        conformance(engine="plugin:acme-engine", case=["scope/look-up"], as_json=True)
    assert ended.value.exit_code == 0 and '"pass"' in capsys.readouterr().out


def test_a_command_of_somebody_elses(acme: list[str]) -> None:
    from kvcustody.console.command import CustodyGroup
    from kvcustody.console.plugins import add_command

    app = typer.Typer(cls=CustodyGroup, no_args_is_help=True, add_completion=False)

    @app.command()
    def ours() -> None:
        """Ours."""

    (entry,) = (each for each in extensions.entry_points(group="kvcustody.commands") if each.name == "acme")
    add_command(app, entry)
    assert CliRunner().invoke(app, ["acme", "hello"]).stdout == "hello from acme\n"


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: open_signer(Path("plugin:cart")), "did you mean `plugin:card`"),
        (lambda: open_signer(Path("plugin:zebra")), "installed: broken, card, gone"),
        (lambda: open_signer(Path("plugin:broken")), "no card in the reader"),
        (lambda: open_signer(Path("plugin:gone")), "acme-kv 1.2 cannot be loaded: AttributeError"),
        (
            lambda: load(extensions.EVICTION_POLICIES, "half").make(
                import_module("kvcustody.allocator.prefix.eviction_policy").EvictionPolicy
            ),
            "has no `by_birth`, `by_priority`, `evicted`, `level`",
        ),
        (lambda: open_shape("plain", ""), "one of ocsf, cloudevents, leaf, or `plugin:NAME`"),
        (lambda: load_settings(eviction_policy="two-queue"), "eviction_policy"),
    ],
)
def test_what_cannot_be_used_is_said(acme: list[str], attempt: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        attempt()
    assert said in str(refused.value)


def test_a_name_that_two_distributions_claim_is_refused(tmp_path: Path, acme: list[str]) -> None:
    assert isinstance(load(extensions.SIGNERS, "plugin:card"), Extension)
    distribution(tmp_path / "site", "evil-kv", "6.6", "[kvcustody.signers]\ncard = acme_kv:CardReader\n")
    invalidate_caches()
    with pytest.raises(ConfigError, match=r"claimed by .*acme-kv.* and .*evil-kv"):
        load(extensions.SIGNERS, "plugin:card")


def test_a_bare_name_among_tiers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write `plugin:bucket`"):
        open_worker(settings(tmp_path, tiers="bucket"), MemoryPlan(memory, 64, 1, 1024))


def test_an_extension_s_tier_is_not_named_as_one_of_ours(tmp_path: Path, acme: list[str]) -> None:
    chosen = settings(tmp_path, tiers="plugin:bucket")
    plugins = load_plugins(chosen)
    assert [tier.name for tier in plugins.open_tiers(chosen, ["host"])] == ["remote"]
    with pytest.raises(ConfigError, match="two tiers are named"):
        plugins.open_tiers(chosen, ["host", "remote"])


def test_the_wrapping_port_is_what_the_contract_says() -> None:
    assert extensions._public(RootKeyWrapping) >= {"wrap", "unwrap", "sign", "destroy", "verification_key"}
