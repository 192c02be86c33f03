"""Stores of sealed objects: each implements one port, and passes one suite of tests."""
