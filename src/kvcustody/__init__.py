"""kvcustody: isolation, retention and zeroization of LLM key/value caches, with evidence.

The names in `__all__` are the front door: documented, tested and stable. Every other module is private by convention,
though nothing hides it. A name is imported when it is first used: `import kvcustody` costs nothing and needs no torch.

    from kvcustody import MemoryPlan, TensorMemory, TensorSpec, load_settings, open_worker

    spec = TensorSpec(layers=2, kv_heads=8, head_dim=64)
    plan = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, spec), blocks=1024, shards=1, bytes_per_block=65536)
    with open_worker(load_settings(), plan) as worker:
        admission = worker.governor.admit(principal, model, tokens)

The rooms of the house are sub-packages: `kernels`, `allocator`, `policies`, `audit`, `migrations`, `governance`,
`integrations`, `console`, and `testkit`, which is installed apart (docs/build/architecture.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcustody._version import __version__

if TYPE_CHECKING:
    from kvcustody.allocator.pool.memory_protocol import Memory
    from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
    from kvcustody.audit.verify.ledger.fsck_ledger import fsck
    from kvcustody.audit.verify.verify_export import verify_export
    from kvcustody.clock import Clock, SystemClock, VirtualClock
    from kvcustody.errors import (
        AdmissionError,
        CapacityError,
        ConfigError,
        CustodyError,
        DeviceError,
        HandleError,
        IdentityError,
        IsolationError,
        KeyringError,
        LedgerError,
        LedgerUnavailable,
        PolicyError,
        ServiceError,
    )
    from kvcustody.governance.admission_outcome import Admission, AdmissionRefused, Deferred
    from kvcustody.governance.external.engine_control import EngineControl
    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.governance.governor.governor import Governor
    from kvcustody.governance.identity.model_identity import ModelIdentity
    from kvcustody.governance.identity.principal import Principal, identify
    from kvcustody.governance.settings import Settings, load_settings
    from kvcustody.governance.worker.engine_worker import EnginePlan, EngineWorker, open_engine_worker
    from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
    from kvcustody.policies.reading.load_policy import load_policy
    from kvcustody.policies.table.compile import compile_policy

_MODULES = {
    "allocator.pool.memory_protocol": ("Memory",),
    "allocator.pool.tensor_memory": ("TensorMemory", "TensorSpec"),
    "audit.verify.ledger.fsck_ledger": ("fsck",),
    "audit.verify.verify_export": ("verify_export",),
    "clock": ("Clock", "SystemClock", "VirtualClock"),
    "errors": (
        "AdmissionError",
        "CapacityError",
        "ConfigError",
        "CustodyError",
        "DeviceError",
        "HandleError",
        "IdentityError",
        "IsolationError",
        "KeyringError",
        "LedgerError",
        "LedgerUnavailable",
        "PolicyError",
        "ServiceError",
    ),
    "governance.admission_outcome": ("Admission", "AdmissionRefused", "Deferred"),
    "governance.external.engine_control": ("EngineControl",),
    "governance.external.engine_port": ("EnginePort",),
    "governance.governor.governor": ("Governor",),
    "governance.identity.model_identity": ("ModelIdentity",),
    "governance.identity.principal": ("Principal", "identify"),
    "governance.settings": ("Settings", "load_settings"),
    "governance.worker.engine_worker": ("EnginePlan", "EngineWorker", "open_engine_worker"),
    "governance.worker.worker": ("MemoryPlan", "Worker", "open_worker"),
    "policies.reading.load_policy": ("load_policy",),
    "policies.table.compile": ("compile_policy",),
}
_HOMES = {name: f"kvcustody.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: RUF022 - by subject
    "__version__",
    # a worker over memory of ours
    "open_worker",
    "Worker",
    "MemoryPlan",
    "Memory",
    "TensorMemory",
    "TensorSpec",
    "Governor",
    "Admission",
    "AdmissionRefused",
    "Deferred",
    # an engine that allocates by itself
    "open_engine_worker",
    "EngineWorker",
    "EnginePlan",
    "EnginePort",
    "EngineControl",
    # who asks, and with which model
    "Principal",
    "identify",
    "ModelIdentity",
    # settings, policy, time
    "Settings",
    "load_settings",
    "load_policy",
    "compile_policy",
    "Clock",
    "SystemClock",
    "VirtualClock",
    # evidence
    "fsck",
    "verify_export",
    # every error that a caller can meet
    "CustodyError",
    "ConfigError",
    "PolicyError",
    "IdentityError",
    "KeyringError",
    "HandleError",
    "CapacityError",
    "AdmissionError",
    "LedgerError",
    "LedgerUnavailable",
    "ServiceError",
    "DeviceError",
    "IsolationError",
]


def __getattr__(name: str) -> Any:
    """A public name, imported now; raises `AttributeError` for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module `kvcustody` has no public name `{name}`", name=name, obj=None)
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
