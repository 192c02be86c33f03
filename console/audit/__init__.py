"""`kvcustody audit`: what the ledger holds, shown, exported, checked and kept."""
