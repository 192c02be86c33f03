"""Hand-over: computed blocks pass sealed from the engine that prefills to the engine that decodes."""
