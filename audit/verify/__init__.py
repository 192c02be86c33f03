"""Verifiers: a ledger, export, report or certificate contains what the trusted keys signed."""
