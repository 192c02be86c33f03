"""The trust configuration file: the signers that this deployment accepts. TOML, kept by the operators of the workers.

1. It alone demands signatures. A key has one name; a name has one key.
2. One key never has the roles of author and approver, so whoever proposes cannot approve.
3. A malformed, incomplete or ambiguous file is an error: there is no default trust.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, parse_vkey
from kvcustody.errors import ConfigError
from kvcustody.logger import get_logger
from kvcustody.policies.bundle.trust import KeyRole, Trust, TrustedKey

SCHEMA = "kvcustody/trust@1"
_FILE_BYTES_MAX = 1 << 20
_log = get_logger(__name__)
_FIELDS = {"schema", "audience", "break_glass_hours_max", "keys"}
_KEY_FIELDS = {"key", "roles", "tenant"}


def read_trust(path: Path) -> Trust:
    """Read the trust configuration in a file; raises `ConfigError` with the reason."""
    try:
        data = path.read_bytes()
        if len(data) > _FILE_BYTES_MAX:
            raise ConfigError(f"trust file `{path}` is larger than 1 MiB", path=path)
        document = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"trust file `{path}`: cannot be read ({error.strerror})", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"trust file `{path}`: {' '.join(str(error).split())[:200]}", path=path) from None
    try:
        return trust_of(document)
    except ConfigError as error:
        raise ConfigError(f"trust file `{path}`: {error.message}", path=path) from None


class TrustFile:
    """A trust configuration that is read again when its file changes: adding a key needs no restart.

    A change that is no trust configuration changes nothing; the log says so once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = self._stat()
        self._trust = read_trust(path)

    def current(self) -> Trust:
        """The present configuration, or the last valid one."""
        state = self._stat()
        if state != self._state:
            self._state = state
            try:
                self._trust = read_trust(self._path)
                _log.info("trust configuration reloaded", path=str(self._path))
            except ConfigError as error:
                _log.error("trust configuration refused; the previous one stays in effect", reason=error.message)
        return self._trust

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return status.st_mtime_ns, status.st_size, status.st_ino


def trust_of(document: Mapping[str, Any]) -> Trust:
    """Return the trust configuration of a parsed file; raises `ConfigError`."""
    unknown = sorted(document.keys() - _FIELDS)
    if unknown:
        raise ConfigError(f"`{unknown[0]}` is not a field; the fields are {', '.join(sorted(_FIELDS))}")
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"`schema` is not `{SCHEMA}`")
    audience, hours = document.get("audience"), document.get("break_glass_hours_max", 4)
    if not isinstance(audience, str) or not audience.isprintable() or not audience or " " in audience:
        raise ConfigError("`audience` must name this deployment, without spaces")
    if type(hours) is not int or not 1 <= hours <= 72:
        raise ConfigError("`break_glass_hours_max` must be a number of hours from 1 to 72")
    listed = document.get("keys")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError("`keys` must be a list of tables (`[[keys]]`)")
    keys = [_key(item) for item in listed]
    _check_keys(keys)
    return Trust(audience, {key.name: key for key in keys}, hours * 3600)


def write_trust(audience: str, keys: Iterable[tuple[str, str, str | None]], hours: int = 4) -> str:
    """Return a trust file's text from (vkey, role, tenant or None); raises `ConfigError` where it would be refused."""
    lines = [f'schema = "{SCHEMA}"', f'audience = "{audience}"', f"break_glass_hours_max = {hours}"]
    for vkey, role, tenant in keys:
        lines += ["", "[[keys]]", f'key = "{vkey}"', f'roles = ["{role}"]']
        if tenant is not None:
            lines.append(f'tenant = "{tenant}"')
    text = "\n".join(lines) + "\n"
    try:
        trust_of(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        raise ConfigError("a name has a character that a trust file cannot hold") from None
    return text


def _key(item: Mapping[str, Any]) -> TrustedKey:
    unknown = sorted(item.keys() - _KEY_FIELDS)
    if unknown:
        raise ConfigError(f"`{unknown[0]}` is not a field of a key")
    try:
        vkey = parse_vkey(str(item.get("key", "")))
    except NoteError as error:
        raise ConfigError(error.message) from None
    if vkey.kind is not KeyKind.ED25519:
        raise ConfigError(f"key `{vkey.name}` is not an Ed25519 key")
    names = item.get("roles")
    known = {role.value: role for role in KeyRole}
    if not isinstance(names, list) or not names or any(name not in known for name in names):
        raise ConfigError(f"key `{vkey.name}`: `roles` must list some of {', '.join(known)}")
    roles = frozenset(known[name] for name in names)
    tenant = item.get("tenant")
    if (KeyRole.OWNER in roles) != (isinstance(tenant, str) and tenant != ""):
        raise ConfigError(f"key `{vkey.name}`: an owner, and nobody else, needs a `tenant`")
    if {KeyRole.AUTHOR, KeyRole.APPROVER} <= roles:
        raise ConfigError(f"key `{vkey.name}` is author and approver; nobody may approve their own proposal")
    return TrustedKey(vkey.name, vkey.public, roles, tenant)


def _check_keys(keys: list[TrustedKey]) -> None:
    if len({key.name for key in keys}) != len(keys):
        raise ConfigError("two keys have the same name")
    if len({key.public for key in keys}) != len(keys):
        raise ConfigError("one key is listed under two names")
    for role in (KeyRole.AUTHOR, KeyRole.APPROVER):
        if not any(role in key.roles for key in keys):
            raise ConfigError(f"no key has the role `{role.value}`")
