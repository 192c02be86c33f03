"""What doors before routers, routers and workers share: door tokens, and the names that routers know requesters by."""
