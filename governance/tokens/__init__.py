"""Scope tokens: short-lived, signed statements of a request's identity, and which of them are spent."""
