"""Ledgers with a history, filled by the real writer."""
