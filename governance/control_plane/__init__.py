"""Clients of the control plane: what workers and command lines use to reach it."""
