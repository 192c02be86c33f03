"""The database under the ledger: SQLite and PostgreSQL, bulk inserts, monthly partitions, roles and triggers."""
