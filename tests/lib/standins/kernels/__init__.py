"""Kernels compiled for devices that are not here."""
