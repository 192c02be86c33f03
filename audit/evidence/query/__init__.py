"""What reports, the API and the console ask of the ledger; every answer is a function of its rows and the arguments."""
