"""Governed blocks in NVIDIA Dynamo's router: published in their tenant's namespace or not at all."""
