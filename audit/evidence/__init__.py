"""What the ledger answers: each question is a function of a connection, with a typed answer."""
