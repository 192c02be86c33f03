"""Signed policy bundles: the document with a manifest, its signatures, and the keys that are trusted."""
