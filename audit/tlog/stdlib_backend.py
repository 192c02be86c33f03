"""`backend` with the standard library only: Ed25519 by its definition, and an equally strict `json`.

Slower by far (a signature takes milliseconds), and enough for the handful of signatures over an export. It holds no
secret, so nothing here needs constant time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvcustody.audit.tlog.signed_note import CannotCheckError

EdwardsPoint = tuple[int, int, int, int]  # (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z

FIELD = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
CURVE_D = -121665 * pow(121666, FIELD - 2, FIELD) % FIELD


def ed25519_verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether the 64-byte signature is the key's over the message (RFC 8032, section 5.1.7)."""
    if len(public) != 32 or len(signature) != 64:
        return False
    base = _decode_point((4 * pow(5, FIELD - 2, FIELD) % FIELD).to_bytes(32, "little"))
    key, nonce = _decode_point(public), _decode_point(signature[:32])
    scalar = int.from_bytes(signature[32:], "little")
    if base is None or key is None or nonce is None or scalar >= ORDER:
        return False
    challenge = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    left, right = _multiply(scalar, base), _add_points(nonce, _multiply(challenge, key))
    same_x = (left[0] * right[2] - right[0] * left[2]) % FIELD == 0
    return same_x and (left[1] * right[2] - right[1] * left[2]) % FIELD == 0


def ml_dsa_44_verifies(public: bytes, signature: bytes, message: bytes, context: bytes | None = None) -> bool:
    """Raise `CannotCheckError`: Python's library has no ML-DSA-44."""
    raise CannotCheckError("this program cannot check ML-DSA-44 signatures; use `kvcustody audit verify`")


def parse_json(data: bytes) -> Any:
    """Return the value of strict JSON (RFC 8259, UTF-8, no lone surrogates); raises `ValueError`."""
    text = data.decode()
    try:
        value = _STRICT.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    return value


def canonical_json(value: Any) -> bytes:
    """Return the canonical form of a JSON value without floats: sorted keys, no white space, a final newline."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def arrow() -> tuple[Any, Any]:
    """Raise `CannotCheckError`: Python's library has no Parquet."""
    raise CannotCheckError("check Parquet files with `kvcustody audit verify`")


def _decode_point(data: bytes) -> EdwardsPoint | None:
    """Return the point that 32 bytes encode; None if there is none."""
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= FIELD:
        return None
    square = (y * y - 1) * pow(CURVE_D * y * y + 1, FIELD - 2, FIELD) % FIELD
    x = pow(square, (FIELD + 3) // 8, FIELD)
    if (x * x - square) % FIELD:
        x = x * pow(2, (FIELD - 1) // 4, FIELD) % FIELD
    if (x * x - square) % FIELD or (x == 0 and sign):
        return None
    x = FIELD - x if x & 1 != sign else x
    return (x, y, 1, x * y % FIELD)


def _add_points(one: EdwardsPoint, two: EdwardsPoint) -> EdwardsPoint:
    a = (one[1] - one[0]) * (two[1] - two[0]) % FIELD
    b = (one[1] + one[0]) * (two[1] + two[0]) % FIELD
    c, d = 2 * one[3] * two[3] * CURVE_D % FIELD, 2 * one[2] * two[2] % FIELD
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % FIELD, g * h % FIELD, f * g % FIELD, e * h % FIELD)


def _multiply(factor: int, point: EdwardsPoint) -> EdwardsPoint:
    total = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = _add_points(total, point)
        point, factor = _add_points(point, point), factor >> 1
    return total


def _no_constant(name: str) -> Any:
    raise ValueError(f"`{name}` is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"`{text[:40]}` is a number that JSON readers interpret differently")
    return value


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
