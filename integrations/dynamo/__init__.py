"""Governed blocks in NVIDIA Dynamo's router: told in their tenant's namespace or not at all."""
