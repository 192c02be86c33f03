"""Exports of the ledger for offline checks by auditors, and the programs that check them."""
