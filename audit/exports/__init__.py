"""Exports of the ledger that an auditor checks offline, and the programs that check them."""
