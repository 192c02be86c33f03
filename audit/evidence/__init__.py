"""Questions to the ledger. Each is a function of a connection with a typed answer."""
