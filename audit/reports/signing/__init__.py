"""The key that signs reports: how a report carries its signature, and what shows that the ledger names the key."""
