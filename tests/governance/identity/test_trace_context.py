"""W3C Trace Context: what is a trace, and what is taken for none."""

from __future__ import annotations

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.w3c_trace import check_trace, is_trace, trace_in, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REFUSED = {
    "empty": "",
    "in capitals": TRACE.upper(),
    "of zeros": "0" * 32,
    "too short": TRACE[1:],
    "too long": TRACE + "0",
    "with a newline": TRACE + "\n",
    "other digits": "٤" * 32,
    "a number": 7,
    "bytes": TRACE.encode(),
    "nothing": None,
}
MALFORMED = {
    "empty": "",
    "no dashes": TRACE,
    "a trace of zeros": f"00-{'0' * 32}-{SPAN}-01",
    "a span of zeros": f"00-{TRACE}-{'0' * 16}-01",
    "capitals": f"00-{TRACE.upper()}-{SPAN}-01",
    "version ff": f"ff-{TRACE}-{SPAN}-01",
    "more than version 00 has": f"00-{TRACE}-{SPAN}-01-what",
    "no dash before what is more": f"01-{TRACE}-{SPAN}-01what",
    "flags of one digit": f"00-{TRACE}-{SPAN}-1",
    "a space": f" 00-{TRACE}-{SPAN}-01",
    "a newline": f"00-{TRACE}-{SPAN}-01\n",
    "much too long": f"01-{TRACE}-{SPAN}-01-{'x' * 600}",
    "a number": 7,
    "bytes": f"00-{TRACE}-{SPAN}-01".encode(),
    "nothing": None,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_trace_is_refused_without_its_text(case: str) -> None:
    assert not is_trace(REFUSED[case])
    with pytest.raises(IdentityError, match="trace: must be 32") as refused:
        check_trace(REFUSED[case])
    assert refused.value.operands["field"] == "trace"


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_traceparent_is_none(case: str) -> None:
    assert trace_of(MALFORMED[case]) == ""


@pytest.mark.parametrize("text", [f"00-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-01-x y"])
def test_a_trace_is_read_from_its_header(text: str) -> None:
    """Versions that come later may say more."""
    assert trace_of(text) == trace_in({"traceparent": text, "tracestate": "a=b"}) == TRACE
    assert is_trace(TRACE) and check_trace(TRACE) is TRACE


def test_headers_without_one_have_no_trace() -> None:
    assert trace_in(None) == trace_in({}) == trace_in({"tracestate": "a=b"}) == ""
