"""Identities: principals, model identities, domains, and their canonical bytes."""
