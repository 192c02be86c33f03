"""The ledger's database: SQLite and PostgreSQL, bulk inserts, monthly partitions, roles and triggers."""
