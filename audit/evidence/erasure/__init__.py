"""Erasures in the ledger: previews, requests, answers, and the certificate."""
