"""Signed requests to S3 stores (AWS Signature Version 4), for what no client library here offers.

    requests = S3Requests("https://s3.example", "bucket", key, seconds=2.0)
    answer = requests.ask("GET", "", {"versions": "", "prefix": "objects/"})

1. Objects are addressed by path (`ENDPOINT/BUCKET/KEY`). Without TLS only loopback is spoken to; redirects are not
   followed.
2. A request has one deadline, and of its answer no more than `ANSWER_BYTES_MAX` are read.
3. The secret is in no message.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from kvcustody.http_exchange import deadline_transport, is_loopback, read_bounded

ANSWER_BYTES_MAX = 16 << 20
_ALGORITHM = "AWS4-HMAC-SHA256"


class S3Key(NamedTuple):
    """An access key: its public id, its secret, and the region that it signs for."""

    id: str
    secret: bytes
    region: str

    def __repr__(self) -> str:
        """Without the secret."""
        return f"S3Key({self.id!r})"


class S3Answer(NamedTuple):
    """The store's answer."""

    status: int
    body: bytes


class S3Requests:
    """One bucket. Thread-safe. Raises `ValueError` for an invalid endpoint, or one without encryption."""

    def __init__(self, endpoint: str, bucket: str, key: S3Key, *, seconds: float, connections: int = 8) -> None:
        import httpx

        parts = urlsplit(endpoint)
        secure = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
        if not parts.hostname or not secure or parts.username or parts.path not in ("", "/") or parts.query:
            raise ValueError(f"`{endpoint}` is not an https address without a path (http is allowed for loopback only)")
        self._bucket, self._key, self._seconds = bucket, key, seconds
        self._endpoint, self._host = f"{parts.scheme}://{parts.netloc}", parts.netloc
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(transport=deadline_transport(limits=limits), timeout=seconds, trust_env=False)

    def ask(
        self,
        method: str,
        name: str,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> S3Answer:
        """Return the store's answer. Raises `OSError` without one in time and within bounds."""
        import httpx

        path, query_text = f"/{self._bucket}/{name}" if name else f"/{self._bucket}", canonical_query(query or {})
        given = dict(headers or {})
        if body:
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            given["content-md5"] = base64.b64encode(digest).decode()
        signed = signed_headers(method, self._host, path, given, body, self._key, datetime.now(UTC), query_text)
        url = self._endpoint + quote(path) + (f"?{query_text}" if query_text else "")
        request = self._client.build_request(method, url, content=body, headers=signed)
        try:
            answer = read_bounded(self._client, request, deadline_seconds=self._seconds, bytes_max=ANSWER_BYTES_MAX)
        except httpx.HTTPError as error:
            raise OSError(f"no answer ({type(error).__name__})") from None
        return S3Answer(answer.status_code, answer.content)

    def close(self) -> None:
        """Close connections."""
        self._client.close()


def canonical_query(query: Mapping[str, str]) -> str:
    """Return a query as it is sent and signed: sorted by name and escaped."""
    return "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))


def signed_headers(
    method: str,
    host: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    key: S3Key,
    now: datetime,
    query: str = "",
) -> dict[str, str]:
    """Return a request's headers with its signature, by lower-case name.

    `query`: as `canonical_query` makes it.
    """
    moment, content = now.strftime("%Y%m%dT%H%M%SZ"), hashlib.sha256(body).hexdigest()
    given = {**headers, "host": host, "x-amz-content-sha256": content, "x-amz-date": moment}
    names = ";".join(sorted(given))
    lines = "".join(f"{name}:{given[name].strip()}\n" for name in sorted(given))
    request = "\n".join((method, quote(path), query, lines, names, content))
    scope = f"{moment[:8]}/{key.region}/s3/aws4_request"
    text = "\n".join((_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    derived = b"AWS4" + key.secret
    for part in scope.split("/"):
        derived = hmac.digest(derived, part.encode(), "sha256")
    signature = hmac.digest(derived, text.encode(), "sha256").hex()
    credential = f"Credential={key.id}/{scope},SignedHeaders={names},Signature={signature}"
    return given | {"authorization": f"{_ALGORITHM} {credential}"}
