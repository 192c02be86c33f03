"""Erasures in one process: selection, the run until every block is zero, and requests in a ledger."""
