"""The ledger's database: its tables, and how they are opened, filled and kept as they are."""
