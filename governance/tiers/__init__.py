"""Custody beyond the device: KV blocks leave it only sealed, and never live longer for it
(docs/build/sealed-object.md).
"""
