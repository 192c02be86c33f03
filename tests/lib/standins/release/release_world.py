"""A small release: people with keys, a store, a desk, and a worker that follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.audit.kinds import Event
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import VirtualClock
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.rollback_guard import RevisionMark
from kvcustody.governance.release.signer import FileSigner
from kvcustody.governance.release.store import FolderStore, ReleaseStore
from kvcustody.governance.release.trust import trust_of, write_trust
from kvcustody.governance.release.worker_follow import PolicyFeed, ReleaseReader
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.policies.bundle.trust import Trust
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders
from standins.builders import governor

POLICY = """\
schema: kvcustody/policy@1
name: {name}
profile: shared
scope: tenant
classifications: [low, high]
classify:
  - {{tenant: "*", as: low}}
tenants:
  holder: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}
  reader: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}
  third: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}
{grants}
rules:
  - {{id: own, effect: permit, action: reuse, when: {{reader: owner}}}}
{rules}
retention:
  low: {{idle: {idle}, absolute: 8h, active_max: 2h}}
  high: {{idle: {idle}, absolute: 8h, active_max: 2h}}
scrub:
  default: {{within: 1s, verify: none}}
offload: {{low: never, high: never}}
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""
READS = "  - {id: reads, owner: holder, reader: reader, at_most: low, until: 2027-01-01, reason: test}\n"
THIRD = "  - {id: third-reads, owner: holder, reader: third, at_most: low, until: 2027-01-01, reason: test}\n"
FORBID = "  - {id: no-high, effect: forbid, action: reuse, when: {classification: high}}"
MODEL = tiny_model(kv_dtype="bf16", attention={"heads": 8})


def policy(*grants: str, idle: str = "1h", rules: str = "", name: str = "released") -> str:
    """A policy document with these grants."""
    listed = "grants:\n" + "".join(grants) if grants else ""
    return POLICY.format(grants=listed, idle=idle, rules=rules, name=name)


class People:
    """Who holds keys, and the trust configuration that names them."""

    def __init__(self) -> None:
        roles: dict[str, tuple[str, str | None]] = {
            "ada": ("author", None),
            "grace": ("approver", None),
            "olive": ("operator", None),
            "holger": ("owner", "holder"),
            "rita": ("owner", "reader"),
            "brock": ("break-glass", None),
        }
        keys = {name: SigningKey.generate(name) for name in roles}
        for name, key in keys.items():
            setattr(self, name, FileSigner(key))
        text = write_trust("prod", [(str(keys[name].verifier), role, tenant) for name, (role, tenant) in roles.items()])
        import tomllib

        self.trust: Trust = trust_of(tomllib.loads(text))
        self.eve = FileSigner(SigningKey.generate("eve"))

    def __getattr__(self, name: str) -> FileSigner:
        raise AttributeError(name)


class StepLedger(CountingLedger):
    """Keeps the durable events, and refuses them while told to."""

    def __init__(self) -> None:
        super().__init__()
        self.durable: list[Event] = []
        self.failing = False

    def submit_durable(self, event: Event, /) -> int:
        if self.failing:
            raise LedgerUnavailable("the ledger is away")
        self.durable.append(event)
        return super().submit_durable(event)


class Release:
    """A desk over a store."""

    def __init__(self, folder: Path, store: ReleaseStore | None = None) -> None:
        self.people = People()
        self.clock = VirtualClock()
        self.ledger = StepLedger()
        if store is None:
            (folder / "release").mkdir()
            store = FolderStore(folder / "release")
        self.store = store
        self.folder = folder
        self.desk = ReleaseWorkflow(store, self.people.trust, clock=self.clock, ledger=self.ledger)

    def release(self, document: str, *, consents: tuple[tuple[str, FileSigner], ...] = ()) -> int:
        """Propose, consent, approve and activate; returns the revision."""
        revision = self.desk.propose(document, self.people.ada, note="test").revision
        for source, signer in consents:
            self.desk.consent(revision, source, signer)
        self.approve(revision)
        self.desk.activate(revision, self.people.grace)
        return revision

    def approve(self, revision: int) -> None:
        self.desk.approve(revision, self.people.grace, cells=self.desk.review(revision).cells)

    def release_reads(self) -> int:
        """The revision that opens `reads`."""
        return self.release(policy(READS), consents=(("reads", self.people.holger),))


def worker_settings(folder: Path, **fields: object) -> Settings:
    own: dict[str, object] = {
        **builders.worker_files(folder),
        "policy_trust": str(folder / "trust.toml"),
        "policy_mark_path": folder / "mark",
        "order_key_path": folder / "orders.key",
    }
    return load_settings(**own | fields)


class Follower:
    """A worker that follows a release: a Governor and its feed."""

    def __init__(self, release: Release, *, mark: str = "mark", lease_seconds: float = 60) -> None:
        self.clock = release.clock
        self.ledger = StepLedger()
        self.reader = ReleaseReader(release.store, lambda: release.people.trust, RevisionMark(release.folder / mark))
        table, expires_us = self.reader.first("shared")
        self.governor = governor(table, self.clock, ledger=self.ledger, blocks=512, expires_utc_us=expires_us)
        self.feed = PolicyFeed(self.reader, self.governor, self.clock, lease_seconds=lease_seconds)

    def follow(self) -> None:
        """One poll and one engine step."""
        assert self.feed.poll(), self.feed.problem
        self.governor.step()

    def ask(self, tenant: str, prompt: list[int] | None = None) -> int:
        """A whole request; returns its hit tokens."""
        answer = self.admit(tenant, prompt or PROMPT)
        self.governor.commit([answer.request_id], [len(prompt or PROMPT)])
        self.governor.release(answer.request_id)
        self.governor.step()
        return int(answer.hit_tokens)

    def admit(self, tenant: str, prompt: list[int]) -> Any:
        answer = self.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, prompt)
        assert isinstance(answer, Admission), answer
        return answer

    def glance(self, tenant: str) -> int:
        """Hit tokens of the shared prompt past the first use, leaving nothing of the reader's own behind."""
        for _ in range(2):
            answer = self.admit(tenant, PROMPT)
            self.governor.abort(answer.request_id)
            self.governor.settle()
        return int(answer.hit_tokens)


PROMPT = [*range(1, 65), 7]
