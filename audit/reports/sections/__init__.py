"""Sections of a report that are read from the ledger's rows: decisions, read-backs, ages, signatures."""
