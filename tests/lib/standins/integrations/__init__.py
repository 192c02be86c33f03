"""Doors, wires and stand-in engines of the integrations."""
