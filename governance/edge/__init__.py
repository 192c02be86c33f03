"""Shared by doors, routers and workers: door tokens, and the names under which routers know requesters."""
