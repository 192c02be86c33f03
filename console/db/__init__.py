"""`kvcustody db`: the ledger's database."""
