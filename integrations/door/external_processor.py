"""The door as Envoy's external processor (`envoy.service.ext_proc.v3`): authenticate, keep what is listed, sign.

1. A request is refused unless the gate let it pass. An error of ours is a 500, never a pass; Envoy's own answer where
   this process is away is an error too (`failure_mode_allow: false` in `envoy_configuration`).
2. Headers are decided on before a byte of the body is awaited. The body comes whole, below Envoy's own bound.
3. Bytes of bodies that are under way are bounded: beyond it a request is answered 503.
4. Envoy chooses where a request goes once the door has answered to its headers: those say the placement group.
5. Responses: a router's headers about its workers are removed. No response body is read.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service
from envoy.type.v3 import http_status_pb2

from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.door.passed_fields import HOP_HEADERS
from kvcustody.integrations.door.route_receipts import OpenReceipt
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.door")
_SCHEME: Final = "x-forwarded-proto"  # without it Envoy finds no route
_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class ExternalProcessor(service.ExternalProcessorServicer):  # type: ignore[misc]
    """Answers Envoy's messages about requests; one stream is one request."""

    def __init__(self, gate: EdgeGate, *, body_bytes_max: int, under_way_bytes_max: int) -> None:
        self._gate = gate
        self._metrics = gate.metrics
        self._body_bytes_max = body_bytes_max
        self._under_way_bytes_max = under_way_bytes_max
        self._under_way_bytes = 0

    async def Process(  # noqa: N802 - gRPC names it
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """Answer the messages of one request in order."""
        receipts: list[OpenReceipt] = []  # of this one request
        try:
            async for answer in self._answers(request_iterator, receipts):
                yield answer
        finally:
            for receipt in receipts:
                receipt.close()

    async def _answers(self, request_iterator: AsyncIterator[Any], receipts: list[OpenReceipt]) -> AsyncIterator[Any]:
        admitted: AdmittedRequest | None = None
        names: tuple[str, ...] | None = None  # of the request's headers, once they came
        async for message in request_iterator:
            kind = message.WhichOneof("request")
            began = time.perf_counter()
            try:
                if kind == "request_headers":
                    fields = message.request_headers
                    headers = _headers(fields)
                    names = tuple(name for name, _ in headers)
                    admitted, answer = self._of_headers(headers, is_whole=fields.end_of_stream)
                    yield answer
                elif names is None:
                    raise RequestRefused(400, "a request must begin with its headers")
                elif kind == "request_body":
                    yield self._of_body(admitted, names, message.request_body.body, receipts)
                elif kind == "response_headers":
                    yield self._of_response(_headers(message.response_headers), receipts)
                else:
                    raise RequestRefused(400, "trailers are not accepted")
            except RequestRefused as refused:
                _LOG.warning("request refused", status=refused.status, reason=refused.reason)
                self._metrics.refused(refused.status)
                yield _refusal(refused)
                return
            except Exception as error:
                _LOG.error("request refused because of an internal error", error=type(error).__name__)
                self._metrics.refused(500)
                yield _refusal(RequestRefused(500, "the door failed"))
                return
            finally:
                self._metrics.took(kind or "", time.perf_counter() - began)

    def _of_headers(self, raw: list[tuple[str, bytes]], *, is_whole: bool) -> tuple[AdmittedRequest | None, Any]:
        """Return the answer to a request's headers. `is_whole`: no body follows."""
        pseudo = {name: value.decode("latin-1") for name, value in raw if name.startswith(":")}
        headers = RequestHeaders((name.encode(), value) for name, value in raw if not name.startswith(":"))
        path = pseudo.get(":path", "").partition("?")[0]
        routed = {_SCHEME: "https" if pseudo.get(":scheme") == "https" else "http"}
        names = tuple(name for name, _ in raw)
        if headers.one("upgrade") is not None:
            raise RequestRefused(403, "websockets are not served")
        if self._gate.is_open(path):
            return None, self._headers_answer(Forwarded(routed, None), names)
        admitted = self._gate.authenticate(pseudo.get(":method", ""), path, headers)
        self._check_length(headers)
        if admitted.scoped is None:
            plain = self._gate.plain(admitted)
            return admitted, self._headers_answer(plain._replace(headers=routed | plain.headers), names)
        if is_whole:
            raise RequestRefused(400, "body: is missing", param="body")
        placed = self._gate.placed_in(admitted)
        common = messages.CommonResponse(
            header_mutation=messages.HeaderMutation(set_headers=_set(routed | placed.headers)),
            clear_route_cache=True,
        )
        return admitted, messages.ProcessingResponse(request_headers=messages.HeadersResponse(response=common))

    def _check_length(self, headers: RequestHeaders) -> None:
        stated = headers.one("content-length") or ""
        if stated.isdigit() and (len(stated) > 19 or int(stated) > self._body_bytes_max):
            raise self._too_large()

    def _of_body(
        self,
        admitted: AdmittedRequest | None,
        names: tuple[str, ...],
        body: bytes,
        receipts: list[OpenReceipt],
    ) -> Any:
        if admitted is None or admitted.scoped is None:
            return messages.ProcessingResponse(request_body=messages.BodyResponse())
        if len(body) > self._body_bytes_max:
            raise self._too_large()
        if self._under_way_bytes + len(body) > self._under_way_bytes_max:
            raise RequestRefused(503, "the door is busy; try again")
        self._under_way_bytes += len(body)
        try:
            forwarded = self._gate.scope(admitted, body)
        finally:
            self._under_way_bytes -= len(body)
        self._metrics.passed()
        if forwarded.receipt is not None:
            receipts.append(forwarded.receipt)
        return messages.ProcessingResponse(request_body=messages.BodyResponse(response=self._common(forwarded, names)))

    def _of_response(self, headers: list[tuple[str, bytes]], receipts: list[OpenReceipt]) -> Any:
        """Return a response without its headers about workers."""
        status = dict(headers).get(":status", b"")
        for receipt in receipts:
            receipt.answered(int(status) if status.isdigit() else 0, headers)
        ended = {name for name, _ in headers if not self._gate.is_returned(name)}
        removed = sorted(name for name in ended - HOP_HEADERS if not name.startswith(":"))
        change = messages.CommonResponse(header_mutation=messages.HeaderMutation(remove_headers=removed))
        return messages.ProcessingResponse(response_headers=messages.HeadersResponse(response=change))

    def _headers_answer(self, forwarded: Forwarded, names: tuple[str, ...]) -> Any:
        common = self._common(forwarded, names)
        common.clear_route_cache = True
        return messages.ProcessingResponse(request_headers=messages.HeadersResponse(response=common))

    def _common(self, forwarded: Forwarded, names: tuple[str, ...]) -> Any:
        """Return the change to a request: other headers removed, the gate's added, and the new body."""
        given = dict(forwarded.headers)
        body = None
        if forwarded.body is not None:
            given["content-length"] = str(len(forwarded.body))
            body = messages.BodyMutation(body=forwarded.body)
        removed = {name for name in names if not self._stays(name)} - given.keys()
        mutation = messages.HeaderMutation(set_headers=_set(given), remove_headers=sorted(removed))
        return messages.CommonResponse(header_mutation=mutation, body_mutation=body)

    def _stays(self, name: str) -> bool:
        """Return whether a header is forwarded, or belongs to Envoy's own connections."""
        return name.startswith(":") or name == _SCHEME or name in HOP_HEADERS or self._gate.passes(name)

    def _too_large(self) -> RequestRefused:
        return RequestRefused(413, f"body: is larger than {self._body_bytes_max} bytes", param="body")


def _headers(fields: Any) -> list[tuple[str, bytes]]:
    """Return names and values as Envoy gives them: names in lower case, one entry per field."""
    return [(each.key, each.raw_value or each.value.encode()) for each in fields.headers.headers]


def _set(headers: Mapping[str, str]) -> list[Any]:
    return [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
        )
        for name, value in headers.items()
    ]


def _refusal(refused: RequestRefused) -> Any:
    headers = {"content-type": "application/json"}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return messages.ProcessingResponse(
        immediate_response=messages.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=refused.status),
            headers=messages.HeaderMutation(set_headers=_set(headers)),
            body=refused.body(),
            details="kvcustody",
        )
    )


def add_processor(server: grpc.aio.Server, processor: ExternalProcessor) -> None:
    """Serve the processor on a gRPC server."""
    service.add_ExternalProcessorServicer_to_server(processor, server)
