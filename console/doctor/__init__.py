"""`kvcustody doctor`: what of this machine, the settings and the ledger would stop or weaken kvcustody."""
