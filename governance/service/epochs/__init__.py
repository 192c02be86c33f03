"""Erase epochs at the control plane: raising them, serving them, and knowing who follows."""
