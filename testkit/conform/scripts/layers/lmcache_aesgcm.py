"""Does LMCache's `aesgcm` serde open an object as another chunk's, as another model's, or after its replacement?

python lmcache_aesgcm.py renamed-object | other-model | older-object        # needs: lmcache
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class SerdeMemory:
    """The only part of a memory object that the serde reads: its bytes."""

    def __init__(self, size: int) -> None:
        self.byte_array = memoryview(bytearray(size))


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.serde.aesgcm import AesGcmDeserializer, AesGcmSerializer
    from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider

    keys = HkdfKeyProvider(os.urandom(32), key_len=32, info_prefix=b"public case")
    mine = ObjectKey(bytes(32), "model-a", 0, 0, "salt")
    content, frame = os.urandom(4096), 4096 + 64

    def sealed(what: bytes) -> SerdeMemory:
        source, into = SerdeMemory(len(what)), SerdeMemory(frame)
        source.byte_array[:] = what
        AesGcmSerializer(keys).serialize(source, into, mine)
        return into

    names = {
        "renamed-object": [ObjectKey(b"\1" * 32, "model-a", 0, 0, "salt")],
        "other-model": [
            ObjectKey(bytes(32), "model-b", 0, 0, "salt"),
            ObjectKey(bytes(32), "model-a", 1, 0, "salt"),
        ],
        "older-object": [mine],
    }[case]
    first = sealed(content)
    if case == "older-object":
        sealed(os.urandom(4096))  # what stands there now; the first is put back in its place
    opened = []
    for name in names:
        into = SerdeMemory(len(content))
        try:
            AesGcmDeserializer(keys).deserialize(first, into, name)
        except Exception as error:  # whatever refuses it
            return {"found": False, "evidence": f"refused: {type(error).__name__}"}
        opened.append(bytes(into.byte_array) == content)
    return {
        "found": all(opened),
        "evidence": f"{sum(opened)} of {len(opened)} opened with the first object's content",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
