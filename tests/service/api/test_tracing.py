"""Spans of requests: under the caller's trace, told in the log, without names of tenants or people; off by default."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span

from kvcustody.errors import ConfigError
from kvcustody.governance.service.tracing import Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CARRIED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PATH = "/v1/custody/live?tenant=acme"


class Traced:
    """Requests, and the spans that they left."""

    def __init__(self, service: Any, client: Any, people: Any, *, tenants: bool = False) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        service.tracing = Tracing(provider, tenants=tenants)
        self._client, self._key = client, people["tenant-viewer@acme"]

    def __call__(self, path: str = PATH, **headers: str) -> Any:
        """The one span of a request."""
        self._exporter.clear()
        self._client("GET", path, self._key, headers=headers)
        [span] = self._exporter.get_finished_spans()
        return span


@pytest.fixture
def off(service: Any) -> Iterator[None]:
    yield
    service.tracing = None


def test_a_request_is_a_span_of_its_callers_trace(service, client, people, off: None) -> None:
    ask = Traced(service, client, people)
    with structlog.testing.capture_logs() as logs:
        span = ask(**CARRIED)
    assert format(span.context.trace_id, "032x") == TRACE and format(span.parent.span_id, "016x") == PARENT
    told = dict(span.attributes)
    assert span.name == "listLive" and told["http.response.status_code"] == 200
    [line] = [line for line in logs if line["event"] == "request"]
    assert (line["trace_id"], line["request_id"]) == (TRACE, told["kvcustody.request_id"])
    assert ask().parent is None, "control: without `traceparent` a trace begins here"


@pytest.mark.parametrize("wrong", ["", "00-" + "0" * 32 + f"-{PARENT}-01", "x" * 9000, f"00-{TRACE}-{PARENT}"])
def test_a_malformed_traceparent_begins_a_trace_and_refuses_nothing(
    service, client, people, off: None, wrong: str
) -> None:
    span = Traced(service, client, people)(traceparent=wrong)
    assert span.parent is None and span.attributes["http.response.status_code"] == 200


def test_a_span_names_no_tenant_and_no_person(service, client, people, off: None) -> None:
    path = "/v1/custody/residencies?tenant=acme&subject=user-secret"
    shown = Traced(service, client, people)(path).to_json()
    assert "acme" not in shown and "user-secret" not in shown
    named = Traced(service, client, people, tenants=True)(path).to_json()
    assert "acme" in named and "user-secret" not in named, "control: the tenant alone, where it is asked for"


def test_a_span_is_current_while_its_request_is_answered(service, client, people, off: None, monkeypatch) -> None:
    seen = []
    reading = service.reading

    def watched(*given: Any) -> Any:
        seen.append(get_current_span().get_span_context().span_id)
        return reading(*given)

    monkeypatch.setattr(service, "reading", watched)
    span = Traced(service, client, people)().context.span_id
    assert {*seen} == {span}
    assert get_current_span().get_span_context().span_id == 0


@pytest.mark.system("tracing is imported although it is off")
def test_off_imports_nothing_and_the_missing_extra_is_named(make_service, monkeypatch) -> None:
    code = "import sys, kvcustody.governance.api.http.server; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"kvcustody\[otel\]"):
        make_service(tracing="otlp")
