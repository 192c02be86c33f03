"""`kvcustody witness`: a witness for others' ledgers."""
