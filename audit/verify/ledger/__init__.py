"""Checks of a ledger: all that it derives from its leaves, computed again and compared."""
