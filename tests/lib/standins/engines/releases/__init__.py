"""Releases of engines that a suite tries."""
