"""One request to somebody else's server, over within its deadline whatever the other side does.

1. A timeout of a socket begins anew with every byte, so a server that trickles could be waited for for ever: the deadline
   is of the whole exchange, be it in the handshake, the headers or the body.
2. Of an answer no more than so many bytes are read. Redirects are not followed, and no proxy of the environment is used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import NamedTuple

UNIX = "unix:"


class HttpReply(NamedTuple):
    """What came back: status, media type (empty: none), body."""

    status: int
    kind: str
    body: bytes


def exchange(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    deadline_seconds: float,
    bytes_max: int,
    socket_path: str | None = None,
) -> HttpReply:
    """Ask an `http:` or `https:` address, or the server behind a Unix socket (of `url` then only the path counts).

    Raises `OSError` with a reason in a few words (`TimeoutError` past the deadline), and `ValueError` for an address
    that is none. Not for a thread that runs an event loop.
    """
    import httpx

    async def ask() -> HttpReply:
        transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context() if url.startswith("https:") else False, uds=socket_path
        )
        async with (
            asyncio.timeout(deadline_seconds),
            httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,  # noqa: S113 - rule 1
            client.stream(method, url, content=body, headers=headers) as answer,
        ):
            data = b""
            async for chunk in answer.aiter_bytes():
                data += chunk
                if len(data) > bytes_max:
                    raise OSError(f"the answer is longer than {bytes_max} bytes")
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            return HttpReply(answer.status_code, kind, data)

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise TimeoutError("no answer within the deadline") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ValueError(f"`{url}` is no address: {error}") from None
    except httpx.HTTPError as error:
        raise OSError(_reason(error)) from None


def _reason(error: BaseException) -> str:
    """Why an exchange failed, in a few words: the operating system's where it said any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
