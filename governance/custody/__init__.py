"""The custody core: it ends, limits and compares custody over any pool."""
