"""The middleware's parts, from the settings of this process."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError
from kvcustody.governance.settings import Settings
from kvcustody.governance.tokens.scope_token import ScopeTokens
from kvcustody.governance.tokens.scope_token_secret import open_scope_key
from kvcustody.integrations.identity.api_keys import read_keys
from kvcustody.integrations.identity.authenticate_request import RequestGate
from kvcustody.integrations.identity.identity_document import load_identity


def open_request_gate(settings: Settings, clock: Clock | None = None) -> RequestGate:
    """The gate of an API server; `ConfigError` or `KeyringError` if a file is missing or wrong."""
    document = load_identity(settings.identity_path)
    clock = _process_clock(settings, clock)
    with open_scope_key(settings.scope_token_key_path) as secret:
        return RequestGate(
            document,
            settings.identity_path.parent,
            secret,
            clock,
            token_seconds=settings.scope_token_seconds,
        )


def check_issuers(settings: Settings, listed: tuple[str, ...]) -> None:
    """Raise `ConfigError` where the door vouches for several issuers' tenants and the policy lists none.

    Else the first request would decide whose the bare ids are. Where the document is not on this machine, the
    administrator of the door has to see to it.
    """
    try:
        document = load_identity(settings.identity_path)
    except ConfigError:
        return
    issuers = {entry.called for entry in document.issuers}
    if document.api_keys is not None:
        with suppress(ConfigError):
            keys = read_keys(settings.identity_path.parent / document.api_keys.path).keys
            issuers |= {key.issuer for key in keys}
    if len(issuers) > 1 and not listed:
        names = ", ".join(f"`{one}`" for one in sorted(issuers))
        raise ConfigError(
            f"identity document `{settings.identity_path}`: {names} name tenants, and the policy lists no `issuers`; "
            "list them there, first the one whose tenants keep their bare ids",
            path=settings.identity_path,
        )


def open_verifier(settings: Settings, clock: Clock | None = None) -> ScopeTokens:
    """The verifier of an engine process, over the same secret."""
    with open_scope_key(settings.scope_token_key_path) as secret:
        clock = _process_clock(settings, clock)
        return ScopeTokens(secret, clock, remembered_max=settings.scope_tokens_remembered_max)


def _process_clock(settings: Settings, clock: Clock | None) -> DeadlineClock:
    """The clock of a process that ends when it is killed: what is kept of time by then is enough."""
    return settings.open_clock(clock, ExitStack())
