"""The key that signs reports: a report's signature, and the proof that the ledger names the key."""
