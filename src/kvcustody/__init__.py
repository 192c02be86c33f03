"""kvcustody: isolation, retention and zeroization of LLM key/value caches, with evidence.

The rooms of the house are sub-packages: `kernels`, `allocator`, `policies`, `audit`, `migrations`, `governance`,
`console`. Start at `kvcustody.governance.Governor`, the facade that every engine adapter calls.
"""

from kvcustody._version import __version__

__all__ = ["__version__"]
