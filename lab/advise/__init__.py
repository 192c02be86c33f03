"""Seven questions about the cache, answered from workers' reported status or from a replayed trace."""
