"""Checks of documents: one verifier for every kind, from the file itself, and against an export or the ledger."""
