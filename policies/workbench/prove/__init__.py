"""Isolation proved cell by cell: what a table permits, against what the document declares."""
