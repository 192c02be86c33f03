"""Zstandard frames (RFC 8878): batches on the wire to a control plane, and records in a spill.

    packed = compress(batch)
    batch = decompress(packed, bytes_max=16 << 20)

1. A frame states its inflated size. A frame without a size, with size zero, or with more than is permitted is refused
   before any of it is inflated. A frame that states a false size gets no more room than it stated.
2. Bytes are one whole frame with nothing behind it, or they are refused.
"""

from __future__ import annotations

import threading

import zstandard

from kvcustody.errors import CustodyError

ENCODING = "zstd"  # its name as a `Content-Encoding`
_LEVEL = 3
_local = threading.local()  # a compressor is of one thread at a time, and dear to make


class CompressionError(CustodyError):
    """The bytes are not one whole frame; `over` if it would exceed its limit."""

    code = "KVC613"

    def __init__(self, message: str, *, over: bool = False) -> None:
        super().__init__(message)
        self.over = over


def compress(data: bytes) -> bytes:
    """Return one frame, with its size and a checksum."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return compressor.compress(data)


def decompress(data: bytes, *, bytes_max: int) -> bytes:
    """Return a frame's content; raises `CompressionError` (rules 1 and 2)."""
    try:
        stated = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as problem:
        raise CompressionError("it is not a zstd frame") from problem
    if stated in (0, zstandard.CONTENTSIZE_UNKNOWN):
        raise CompressionError("its zstd frame does not state its size, or is empty")
    if stated > bytes_max:
        raise CompressionError(f"its zstd frame states `{stated}` bytes, over {bytes_max}", over=True)
    try:
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        raise CompressionError("it is not one whole zstd frame") from problem
