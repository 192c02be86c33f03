"""Route receipts: both halves of each joined, what is wrong with them, and what they measure of routing."""
