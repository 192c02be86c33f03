"""Checks of a ledger: everything derived from its leaves, recomputed and compared."""
