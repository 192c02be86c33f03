"""A connection to a control plane: one base address, one key, answers or one-line errors.

1. The key comes from a file of mode 0600, and is sent to the one server that was named; redirects are not followed.
2. Without TLS only this machine is talked to.
3. An answer is read up to a bound, and is not unpacked (`http_exchange`).
4. Every refusal is a `ServiceError` with the problem's type; a server that cannot be reached is one with
   `unreachable`, one whose certificate or ours is refused is one with `tls`.
"""

from __future__ import annotations

import ssl
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import orjson

from kvcustody.errors import ConfigError, ServiceError
from kvcustody.governance.service.ingest.worker_protocol import HEADER, PROTOCOL
from kvcustody.guarding_thread import open_question
from kvcustody.http_exchange import deadline_transport, is_loopback, read_bounded

if TYPE_CHECKING:
    import httpx

_KEY_BYTES_MAX = 16_384
_ITEMS_A_PAGE = 1000
_ANSWER_BYTES_MAX = 256 << 20  # as large as the largest report
_WHOLE_ANSWER = 10  # times the timeout of a part
HISTORY = "kvcustody-history"


class ControlPlaneConnection:
    """Requests to one control plane; thread-safe."""

    def __init__(
        self,
        server: str,
        key: str,
        *,
        authority: Path | None = None,
        certificate: Path | None = None,
        certificate_key: Path | None = None,
        timeout_seconds: float = 30.0,
        on_history: Callable[[str], None] | None = None,
    ) -> None:
        """`server`: `https://HOST[:PORT]`, `http://127.0.0.1:PORT` or `unix:PATH`. `authority`: PEM of its CA.

        `on_history` is told what an answer says of a ledger with replayed or generated history.
        """
        files = (authority, certificate, certificate_key)
        plain = not server.startswith("https:") and files == (None, None, None)
        self._client = _client(server, False if plain else _tls(*files), timeout_seconds)
        self._client.headers["Authorization"] = f"Bearer {key}"
        self._client.headers[HEADER] = str(PROTOCOL)
        self._deadline_seconds = _WHOLE_ANSWER * timeout_seconds
        self.server = server
        self._on_history = on_history

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of an answer; parameters that are None are left out. With `wait`, the answer may take that
        many seconds.
        """
        given = {name: value for name, value in query.items() if value is not None}
        with open_question() if given.get("wait") else nullcontext():
            return _json(self.request("GET", path, params=given))

    def items(self, path: str, **query: Any) -> list[Any]:
        """Iterate over every item of a list, page by page."""
        page = self.get(path, limit=_ITEMS_A_PAGE, **query)
        found = list(page["items"])
        while page["next"] is not None:
            page = self.get(path, limit=_ITEMS_A_PAGE, cursor=page["next"], **query)
            found += page["items"]
        return found

    def post(
        self, path: str, body: Any = None, *, key: str | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        """Send a POST under an idempotency key; repeat it once where the connection broke."""
        sent = {"Idempotency-Key": key or uuid.uuid4().hex, **(headers or {})}
        try:
            return _json(self.request("POST", path, json=body, headers=sent))
        except ServiceError as error:
            if error.operands.get("problem") != "unreachable":
                raise
            return _json(self.request("POST", path, json=body, headers=sent))

    def put(self, path: str, body: Any, *, within_seconds: float | None = None) -> Any:
        """Send an idempotent PUT of JSON; `within_seconds` as in `request`."""
        return _json(self.request("PUT", path, json=body, within_seconds=within_seconds))

    def put_bytes(self, path: str, body: bytes, media: str, *, encoding: str = "") -> Any:
        """Send an idempotent PUT of bytes that are encoded as `Content-Encoding` says."""
        headers = {"Content-Type": media} | ({"Content-Encoding": encoding} if encoding else {})
        return _json(self.request("PUT", path, content=body, headers=headers))

    def delete(self, path: str) -> None:
        """Send an idempotent DELETE."""
        self.request("DELETE", path)

    def request(self, method: str, path: str, *, within_seconds: float | None = None, **how: Any) -> httpx.Response:
        """Send any request; raises `ServiceError` for an answer that is not a success (rule 4).

        `within_seconds`: in place of the connection's own bounds, where an engine's thread waits.
        """
        import httpx

        if within_seconds is not None:
            how["timeout"] = within_seconds
        try:
            answer = read_bounded(
                self._client,
                self._client.build_request(method, path, **how),
                deadline_seconds=within_seconds or self._deadline_seconds,
                bytes_max=_ANSWER_BYTES_MAX,
            )
        except httpx.HTTPError as error:
            refused = _of_tls(error)
            if refused is not None:
                why = f"control plane `{self.server}`: no TLS connection ({refused})"
                if refused == _NOT_TLS:
                    why = f"control plane `{self.server}`: what answers there speaks no TLS; name it with http://"
                raise ServiceError(why, problem="tls") from None
            reason = _of_connection(error)
            hint = "; check the address, and that it is running" if reason == "connection refused" else ""
            why = f"control plane `{self.server}` cannot be reached: {reason}{hint}"
            raise ServiceError(why, problem="unreachable") from None
        except RuntimeError:
            if not self._client.is_closed:
                raise
            why = f"control plane `{self.server}`: the connection was closed here"
            raise ServiceError(why, problem="unreachable") from None
        told = answer.headers.get(HISTORY)
        if told is not None and self._on_history is not None:
            self._on_history(told)
        if answer.is_success:
            return answer
        raise _refusal(answer)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> ControlPlaneConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _of_connection(error: BaseException) -> str:
    """Why there was no answer, in words for people."""
    import httpx

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return "the connection was closed" if isinstance(error, httpx.ProtocolError) else "no connection"


_NOT_TLS = "wrong version number"  # OpenSSL's word for an answer that is not TLS


def _of_tls(error: BaseException) -> str | None:
    """Why TLS refused, where it did; None for a connection that merely broke."""
    found: BaseException | None = error
    while found is not None:
        broke = isinstance(found, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        if isinstance(found, ssl.SSLError) and not broke:
            return str(found.reason or type(found).__name__).lower().replace("_", " ")
        found = found.__cause__ or found.__context__
    return None


def is_away(error: ServiceError) -> bool:
    """Whether the control plane could not answer, as opposed to refusing; the call may be repeated."""
    status = int(error.operands.get("status") or 0)
    return error.operands.get("problem") == "unreachable" or status >= 500 or status == 429


def read_key_file(path: Path) -> str:
    """Read the key in a file that only its owner may read; raises `ConfigError`."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(_KEY_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"key file `{path}`: cannot be read ({error.strerror})", path=path) from None
    if mode & 0o077:
        raise ConfigError(f"key file `{path}`: is open to others; chmod 600 it", path=path)
    key = content.decode("utf-8-sig", "replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"key file `{path}`: holds no key", path=path)
    return key


def _client(server: str, verify: ssl.SSLContext | Literal[False], timeout_seconds: float) -> httpx.Client:
    try:
        import httpx
    except ImportError:
        raise ConfigError("httpx is not installed; pip install 'kvcustody[service]'") from None

    limits = httpx.Limits(max_connections=16, max_keepalive_connections=8)
    settings: dict[str, Any] = {"timeout": timeout_seconds, "trust_env": False, "follow_redirects": False}
    if server.startswith("unix:"):
        transport = deadline_transport(verify=False, uds=server.removeprefix("unix:"), limits=limits)
        return httpx.Client(transport=transport, base_url="http://kvcustody", **settings)
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"server `{server}`: must be https://HOST:PORT, http://127.0.0.1:PORT or unix:PATH")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(f"server `{server}`: without TLS only this machine is talked to")
    return httpx.Client(base_url=server, transport=deadline_transport(verify=verify, limits=limits), **settings)


def _tls(authority: Path | None, certificate: Path | None, certificate_key: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if authority is None else str(authority))
        if certificate is not None:
            context.load_cert_chain(certificate, certificate_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS files cannot be used: {error.strerror or type(error).__name__}") from None
    return context


def _json(answer: httpx.Response) -> Any:
    return orjson.loads(answer.content) if answer.content else None


def _refusal(answer: httpx.Response) -> ServiceError:
    try:
        problem = orjson.loads(answer.content)
        name = str(problem["type"]).rpartition(":")[2]
        says = problem.get("detail") or problem["title"]
        for item in problem.get("errors", ())[:3]:
            says += f"; `{item['at']}` {item['what']}"
    except (ValueError, KeyError, TypeError):
        problem, name, says = {}, "unknown", f"answered {answer.status_code}"
    retry = answer.headers.get("retry-after", "")
    wait_seconds = float(retry) if retry.isdecimal() else 0.0
    return ServiceError(
        f"control plane: {says}",
        problem=name,
        status=answer.status_code,
        wait_seconds=wait_seconds,
        leaf=problem.get("leaf") if isinstance(problem, dict) else None,
        request_id=answer.headers.get("x-request-id", ""),
    )
