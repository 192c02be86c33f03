"""`kvcustody scan`: what a ledger says against itself, and what scans have found."""
