"""Scripts that ask cache layers and routers."""
