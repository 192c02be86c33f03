"""Orphans: custody that two sources disagree about, found by full scans and slices, repaired, and put on record."""
