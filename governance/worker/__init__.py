"""One process under governance, from settings: a Governor over our own pool, or a port beside an engine."""
