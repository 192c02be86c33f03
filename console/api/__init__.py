"""`kvcustody api`: every operation of the API as a command, against a server or on the ledger itself."""
