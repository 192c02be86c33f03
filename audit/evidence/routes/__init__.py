"""Route receipts: their two halves joined, their problems, and measures of routing."""
