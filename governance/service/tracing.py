"""OpenTelemetry spans, where the settings ask for them: one a request, under the caller's own trace.

1. Off by default, and then nothing of OpenTelemetry is imported.
2. A span says which operation, which status, how the caller was known and the `request_id` of the log; whose tenant
   it was about only where the settings say so. It holds no path, query, body or name of a person: those name
   subjects.
3. A `traceparent` that is malformed, or comes twice, begins a new trace; it refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvcustody.errors import ConfigError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_CARRIED = ("traceparent", "tracestate")


class Tracing:
    """Makes spans of one service's requests; `provider` receives them."""

    def __init__(self, provider: TracerProvider, *, tenants: bool = False) -> None:
        from opentelemetry.trace import SpanKind, use_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("kvcustody")
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._use = SpanKind.SERVER, use_span
        self._tenants = tenants

    @contextmanager
    def request(self, headers: Mapping[bytes, list[bytes]], name: str) -> Iterator[Span]:
        """Open a request's span while it is answered; its parent is the caller's span."""
        carried = {
            key: headers[key.encode()][0].decode("latin-1")
            for key in _CARRIED
            if len(headers.get(key.encode(), ())) == 1
        }
        parent = self._propagator.extract(carried)
        span = self._tracer.start_span(name, parent, self._kind)
        with self._use(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield span

    def tell(self, span: Span, caller: Caller | None, *, method: str, status: int, request_id: str) -> str:
        """Set the span's attributes (rule 2); returns its trace id, as logs show it."""
        from opentelemetry.trace import StatusCode

        attributes: dict[str, Any] = {
            "http.request.method": method,
            "http.response.status_code": status,
            "kvcustody.request_id": request_id,
            "kvcustody.authenticated_by": "" if caller is None else caller.by,
        }
        if self._tenants and caller is not None and caller.tenant is not None:
            attributes["kvcustody.tenant"] = caller.tenant
        span.set_attributes(attributes)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        return format(span.get_span_context().trace_id, "032x")


def open_tracing(settings: ServiceSettings, stack: ExitStack) -> Tracing | None:
    """Open the tracing of the settings; `stack` flushes it at the end. None without one (rule 1)."""
    if settings.tracing == "off":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[otel]'") from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "kvcustody", "service.instance.id": settings.name})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    stack.callback(provider.shutdown)
    return Tracing(provider, tenants=settings.tracing_tenants)
