"""Custody beyond the device: KV blocks leave it only sealed, and never live longer for it
(docs/reference/formats/sealed-object.md).
"""
