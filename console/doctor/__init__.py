"""`kvcustody doctor`: problems of this machine, the settings and the ledger that would stop or weaken kvcustody."""
