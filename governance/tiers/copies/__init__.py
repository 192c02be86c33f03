"""The parts of one tier: its index, the ends of copies, and others' copies."""
