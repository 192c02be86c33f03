"""Signed policy bundles: a document with a manifest and signatures, and the configuration of trusted keys."""
