"""The tables of the ledger in SQLAlchemy Core."""
