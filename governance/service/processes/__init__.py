"""Processes of the service's own, for what would hold the interpreter that answers everybody."""
