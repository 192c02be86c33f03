"""`kvcustody audit`: shows, exports, checks and retains the ledger's content."""
