"""Scripts for cache layers and routers."""
