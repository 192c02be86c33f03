"""`kvcustody scan`: contradictions within a ledger, and scans' findings."""
