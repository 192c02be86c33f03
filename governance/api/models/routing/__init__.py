"""Route receipts as the API shows them."""
