"""The deployment around an engine under test, in memory: keys, policy, ledger, events. Adapters' harnesses may use it.

1. Nothing is a stand-in for governance: the keyring, the decision table and the token verifier are the real ones. The
   key store is a document in memory, and the ledger keeps its events in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from kvcustody.audit.kinds import Event
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.clock import Clock
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.wrapped_key_store import KeyDocument
from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import Issuers
from kvcustody.testkit.tiny_model import tiny_model


class MemoryKeyStore:
    """A key store with its document in memory."""

    def __init__(self) -> None:
        self._document = KeyDocument()

    def load(self) -> KeyDocument:
        """Return the document as last saved."""
        return self._document.copy()

    def exclusive(self) -> AbstractContextManager[None]:
        """Lock nothing: there is one process."""
        return nullcontext()

    def save(self, document: KeyDocument) -> None:
        """Replace the document."""
        self._document = document.copy()


class KeepingLedger:
    """A ledger that keeps every event in order. Set `admitting` to False to simulate an outage."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.admitting = self.recording = True
        self.shares = TenantShares()

    def issuers(self) -> Issuers:
        """Return no one's issuers: each of its workers begins one."""
        return Issuers()

    def submit(self, events: Sequence[Event], /) -> int:
        """Keep the events."""
        self.events += events
        return len(self.events)

    def submit_durable(self, event: Event, /) -> int:
        """Keep the event."""
        return self.submit([event])


class KeepingPublisher:
    """Keeps the events that the adapter publishes."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Keep the events."""
        self.events += events
        return len(self.events)


def keyring(clock: Clock) -> Keyring:
    """Return a keyring with random secrets, which end with the process."""
    return Keyring(MemoryKeyStore(), RootKeyWrapping(KeyBuffer.random(KEY_BYTES)), clock)


def table(policy: str, revision: int = 1) -> DecisionTable:
    """Return the decision table of a policy's YAML text."""
    return compile_policy(load_policy(policy, name="conformance.yaml"), revision=revision)


def toy_model(block_tokens: int) -> ModelIdentity:
    """Return the identity of the toy model."""
    return tiny_model(
        weights_digest="sha256:toy",
        tokenizer_digest="sha256:toy",
        chat_template="none",
        kv_dtype="int32",
        kv_layout="2-blocks-tokens-lanes",
        block_tokens=block_tokens,
    )
