"""Under which names routers are told of blocks."""
