"""Retention of the ledger itself: purges, legal holds, unlinked subjects, and the move to PostgreSQL."""
