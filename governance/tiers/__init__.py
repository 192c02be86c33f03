"""Custody beyond the device: KV state leaves it only sealed, and never for longer (docs/build/sealed-object.md)."""
