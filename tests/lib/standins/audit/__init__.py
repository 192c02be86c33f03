"""Ledgers, falsified histories and verifiers of their own."""
