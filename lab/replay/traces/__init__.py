"""Recorded traces in their published formats, read as requests of prefix-chained blocks."""
