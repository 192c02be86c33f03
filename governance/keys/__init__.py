"""Keys: wrapped epoch secrets, domain keys derived from them, destruction, and the key that signs checkpoints."""
