"""Batches that workers send: read, checked in processes of their own, merged and committed."""
