"""How long the ledger itself is kept: purges, legal holds, unlinked subjects, and a ledger's move to PostgreSQL."""
