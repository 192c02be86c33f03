"""Dynamo's router behind a governed engine."""
