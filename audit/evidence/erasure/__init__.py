"""Erasures as the ledger has them: what is previewed, who was asked, who answered, and the certificate."""
