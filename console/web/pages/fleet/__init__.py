"""Pages about the fleet: doors, routers and workers."""
