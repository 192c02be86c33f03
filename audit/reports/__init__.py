"""Compliance reports: everything a reader needs to check them, from the ledger as of one checkpoint.

1. A report is a function of the ledger under a checkpoint and of its arguments: no clock, no host, no order of rows.
2. It speaks of evidence supporting a control, for a scope and a period, and never of compliance.
3. Subjects appear as pseudonyms only, so that a report repeats byte for byte after a subject was unlinked.
"""
