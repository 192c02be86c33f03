"""Queries of reports, the API and the console. Every answer is a function of the ledger's rows and the arguments."""
