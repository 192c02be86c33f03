"""The ledger that commit f6818e1f wrote, and a database's whole catalog."""
