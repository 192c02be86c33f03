"""Checks of documents: one verifier for every kind, from the file alone, and against an export or the ledger."""
