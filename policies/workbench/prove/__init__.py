"""Prove isolation cell by cell: a table's permits compared with the document's declarations."""
