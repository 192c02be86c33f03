"""Scripts for serving engines."""
