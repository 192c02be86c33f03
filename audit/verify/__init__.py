"""Verifiers: what is in the ledger, an export, a report or a certificate is what the trusted keys signed."""
