"""The sealed object: one format that any store can hold, and what seals and opens it."""
