"""The packages that verification needs: signatures, JSON and Parquet, nothing else.

`stdlib_backend` has the same names from Python alone. It stands in this one's place in the stand-alone verifier
(`audit/exports/amalgamate.py`); a test holds the two against each other.
"""

from __future__ import annotations

from typing import Any

import orjson
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from kvcustody.audit.tlog.signed_note import CannotCheckError
from kvcustody.signed_document import ed25519_verifies

__all__ = ["arrow", "canonical_json", "ed25519_verifies", "ml_dsa_44_verifies", "parse_json"]


def ml_dsa_44_verifies(public: bytes, signature: bytes, message: bytes, context: bytes | None = None) -> bool:
    """Return whether an ML-DSA-44 signature is the key's; raises `CannotCheckError` if the library lacks it."""
    try:
        from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey

        MLDSA44PublicKey.from_public_bytes(public).verify(signature, message, context)
    except (ImportError, UnsupportedAlgorithm):
        raise CannotCheckError("ML-DSA-44 is not offered by the installed `cryptography`; upgrade it") from None
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_json(data: bytes) -> Any:
    """Return the value of strict JSON (RFC 8259, UTF-8, no lone surrogates); raises `ValueError`."""
    return orjson.loads(data)


def canonical_json(value: Any) -> bytes:
    """Return the canonical form of a JSON value without floats: sorted keys, no white space, a final newline."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER) + b"\n"


def arrow() -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`; raises `CannotCheckError` if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CannotCheckError("Parquet needs pyarrow: install `kvcustody[parquet]`") from None
    return pyarrow, pyarrow.parquet
