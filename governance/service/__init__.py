"""The control plane without its wire: who may ask, what is kept for them, how workers hand in their ledgers."""
