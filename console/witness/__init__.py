"""`kvcustody witness`: a witness for ledgers of others."""
