"""Warnings about a policy that loads: rules without effect, grants that end soon, names that no tenant has."""
