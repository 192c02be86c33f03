"""Orphans: custody that two sources disagree about, found by scans, repaired, and recorded."""
