"""Every error a caller, tenant or operator can cause, in one tree.

CustodyError
├── ConfigError            a setting, file or model config is missing or malformed
│   ├── PolicyError        a policy document was rejected (carries every problem with file:line:column)
│   └── TraceError         a trace line was rejected (carries file and line)
├── IdentityError          no tenant, a malformed tenant, or a claim that cannot be verified
├── NoKeyError             a key cannot be had: for good, or now
│   ├── KeyringError       a root secret, wrapped key or epoch is missing, unreadable or refused
│   │   ├── SealError          a sealed object does not open: it is not what it should be, or a key of it is gone
│   │   └── ReturnedKeysError  keys that were destroyed are in their file again
│   └── KeyServiceUnavailable  the key service does not answer, or refuses this process
├── HandleError            a (block, generation) handle is stale, or a request id is unknown
├── CapacityError          blocks, residencies or quota are exhausted for good (not merely deferred)
├── AdmissionError         a cache was refused by policy, or has to wait (`is_deferred`)
├── LedgerError            the audit store cannot record
│   ├── LedgerUnavailable  a class-A event could not be made durable; the act it guards must not happen
│   └── UnsignedOrderError an order that nobody would follow, because this process cannot sign it
├── ServiceError           the control plane refused a request, or cannot be reached
├── DeviceError            a scrub, verification or copy failed on a device
│   └── StoreError         a store of a tier failed: a miss, and nothing kept
└── IsolationError         an isolation guarantee would be broken; never caught inside kvcustody

Messages are lowercase, quote user values in backticks, and keep their operands as attributes. `code` is stable.
"""

from __future__ import annotations

from typing import Any


class CustodyError(Exception):
    """Base of the tree: `code` is stable across releases, `operands` are the values the message quotes."""

    code = "KVC000"

    def __init__(self, message: str, **operands: Any) -> None:
        super().__init__(message)
        self.message = message
        self.operands = operands
        for name, value in operands.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ConfigError(CustodyError):
    """A setting, file or model config is missing or malformed."""

    code = "KVC100"


class PolicyError(ConfigError):
    """A policy document was rejected; `problems` lists every reason with its place."""

    code = "KVC110"


class TraceError(ConfigError):
    """A trace line was rejected; `path` and `line` say where."""

    code = "KVC120"


class IdentityError(CustodyError):
    """No tenant, a malformed tenant, or a claim that cannot be verified."""

    code = "KVC200"


class NoKeyError(CustodyError):
    """A key cannot be had: `KeyringError` where waiting does not help, `KeyServiceUnavailable` where it may."""

    code = "KVC340"


class KeyringError(NoKeyError):
    """A root secret, wrapped key or epoch is missing, unreadable or refused."""

    code = "KVC300"


class SealError(KeyringError):
    """A sealed object does not open: it is not what it should be, or a key of it is gone."""

    code = "KVC310"


class ReturnedKeysError(KeyringError):
    """Keys that were destroyed are in their file again: an older copy of it was put back."""

    code = "KVC320"

    def __init__(self, path: object, keys: int) -> None:
        super().__init__(
            f"shred keys `{path}`: {keys} destroyed keys were there again, from a copy of the file; "
            "they are destroyed again",
            path=path,
            keys=keys,
        )


class KeyServiceUnavailable(NoKeyError):  # noqa: N818 - a state, as the standard library's `StopIteration`
    """The key service does not answer, or refuses this process: nothing that needs it can be opened now."""

    code = "KVC330"


class HandleError(CustodyError):
    """A (block, generation) handle is stale, or a request id is unknown."""

    code = "KVC400"


class CapacityError(CustodyError):
    """Blocks, residencies or quota are exhausted for good (a passing shortage is a deferral, not an error)."""

    code = "KVC500"


class AdmissionError(CustodyError):
    """An admission was refused, or has to wait and be tried again: `is_deferred` tells which, `reason` why."""

    code = "KVC510"


class LedgerError(CustodyError):
    """The audit store cannot record."""

    code = "KVC600"


class LedgerUnavailable(LedgerError):  # noqa: N818 - as above
    """A class-A event could not be made durable; the act that it guards must not happen."""

    code = "KVC610"


class UnsignedOrderError(LedgerError):
    """An order that nobody would follow: orders are signed here (`policy_trust`), and this process has no key."""

    code = "KVC615"

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"`{kind}` is not recorded, because nobody would follow it: orders are signed here (`policy_trust`), and "
            "this process has no key; name one in `order_key_path` that the trust configuration lists with the role "
            "`orders`",
            kind=kind,
        )


class ServiceError(CustodyError):
    """The control plane refused a request (`problem` names its type), or cannot be reached."""

    code = "KVC800"


class DeviceError(CustodyError):
    """A scrub, verification or copy failed on a device."""

    code = "KVC700"


class StoreError(DeviceError):
    """A store of a tier failed: what it would have returned is a miss, what it would have kept is not there."""

    code = "KVC710"


class IsolationError(CustodyError):
    """An isolation guarantee would be broken. Never caught inside kvcustody."""

    code = "KVC900"


def credential_refused(reason: str) -> IdentityError:
    """The error for a credential that proves nothing; `reason` is for the log and quotes nothing of the credential."""
    return IdentityError(f"credential refused: {reason}", field="credential", reason=reason)
