"""The certificate of an erasure: its facts, and the page beside them."""
