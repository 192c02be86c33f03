"""The parts of one tier: what it has, how copies end, and what others stored."""
