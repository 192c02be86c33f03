"""The tables of the ledger, as SQLAlchemy Core has them."""
