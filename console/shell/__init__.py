"""Completions for shells and the manual page, as files."""
