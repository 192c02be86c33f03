"""Delivers reports to an S3 store: one object a file, by plain HTTP requests with AWS Signature Version 4.

1. Objects are addressed by path (`ENDPOINT/BUCKET/KEY`). The endpoint is https, or http to loopback alone; redirects
   are not followed.
2. An object is put only where none has its name (`If-None-Match`). One that is there is read: the same bytes are a
   delivery, anything else is refused.
3. The secret is never in a message: of an answer only its status and the code of the error are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from kvcustody.audit.siem.sink import SinkError
from kvcustody.governance.service.schedules.parcel import Parcel
from kvcustody.governance.tiers.stores.s3_requests import S3Key, signed_headers
from kvcustody.http_exchange import HttpReply, exchange

_ANSWER_BYTES_MAX = 1 << 20
_DEADLINE_SECONDS = 60.0
_TAKEN = 412  # somebody has the name
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PORTS = {"https": 443, "http": 80}
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class S3Delivery:
    """Delivers into a bucket, below a prefix."""

    kind = "s3"

    def __init__(self, name: str, endpoint: str, bucket: str, prefix: str, key: S3Key) -> None:
        parts = urlsplit(endpoint)
        secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        if not parts.hostname or not secure or parts.username is not None or parts.path not in ("", "/"):
            raise SinkError(
                (
                    f"store `{name}`: its endpoint is not an https address without a path (http is allowed "
                    f"for loopback only)"
                ),
                name=name,
            )
        if parts.query or parts.fragment:
            raise SinkError(f"store `{name}`: its endpoint has a query", name=name)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = parts.port
        self.name = name
        self._host = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
        self._endpoint = f"{parts.scheme}://{self._host}"
        self._bucket, self._prefix, self._key = bucket, prefix.strip("/"), key

    def deliver(self, parcel: Parcel) -> str:
        """Put the parcel's files (rule 2 of `parcel`)."""
        place = "/".join(filter(None, (self._prefix, parcel.name)))
        for name, data in parcel.ordered():
            self._put(f"{place}/{name}", data)
        return f"s3://{self._bucket}/{place}/"

    def _put(self, key: str, data: bytes) -> None:
        answer = self._ask("PUT", key, data, {"if-none-match": "*"})
        if answer.status == _TAKEN:
            self._same(key, data)
        elif answer.status != 200:
            raise self._refused(answer)

    def _same(self, key: str, data: bytes) -> None:
        answer = self._ask("GET", key, b"", {}, bytes_max=max(len(data), _ANSWER_BYTES_MAX))
        if answer.status != 200:
            raise self._refused(answer)
        if answer.body != data:
            raise SinkError(f"store `{self.name}`: `{key}` exists with other content", name=self.name)

    def _ask(
        self,
        method: str,
        key: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        bytes_max: int = _ANSWER_BYTES_MAX,
    ) -> HttpReply:
        path = f"/{self._bucket}/{key}"
        signed = signed_headers(method, self._host, path, headers, body, self._key, datetime.now(UTC))
        try:
            return exchange(
                method,
                self._endpoint + quote(path),
                body,
                signed,
                deadline_seconds=_DEADLINE_SECONDS,
                bytes_max=bytes_max,
            )
        except OSError as problem:
            raise SinkError(f"store `{self.name}`: {problem}", name=self.name) from None

    def _refused(self, answer: HttpReply) -> SinkError:
        code = _CODE.search(answer.body)
        why = f"{answer.status} {code[1].decode()}" if code else str(answer.status)
        return SinkError(f"store `{self.name}` answered {why}", name=self.name, status=answer.status)
