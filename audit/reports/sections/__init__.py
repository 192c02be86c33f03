"""Sections of a report that are read from rows of the ledger: decisions, what was read back, ages, signatures."""
