"""Answers of operations that only read: of an open service, and of a ledger that a command reads."""
