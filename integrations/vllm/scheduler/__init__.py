"""The connector's half in the engine's process: vLLM's scheduler, cache manager and block pool under governance."""
