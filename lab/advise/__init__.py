"""Seven questions about the cache, answered from what workers say of themselves or from a trace that was replayed."""
