"""Custody beyond the device: state leaves it sealed, never for longer (docs/reference/formats/sealed-object.md)."""
