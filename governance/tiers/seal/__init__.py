"""The sealed object: one format for every store, and how it is sealed and opened."""
