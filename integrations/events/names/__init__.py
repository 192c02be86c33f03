"""The names under which routers learn of blocks."""
