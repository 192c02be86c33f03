"""How much a model's cache, and the record of it, takes: `kvcustody size`."""
