"""The ledger's database: its tables, and how they are opened, filled and protected."""
