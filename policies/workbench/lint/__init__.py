"""Warnings about a policy that loads: rules that decide nothing, grants that end soon, names that nobody has."""
