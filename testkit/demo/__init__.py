"""Attacks on a real local engine, with and without governance, side by side. See docs/tutorials/attack-demo.md."""
