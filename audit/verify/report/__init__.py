"""Checks of evidence reports: from the file alone, and against the leaves of an export or a ledger."""
