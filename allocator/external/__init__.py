"""Custody of a pool whose blocks an engine such as vLLM allocates itself."""
