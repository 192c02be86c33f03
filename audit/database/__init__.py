"""The database under the ledger: engines for SQLite and PostgreSQL, bulk inserts, monthly partitions, roles and triggers."""
