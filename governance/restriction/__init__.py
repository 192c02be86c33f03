"""Restricted processing (GDPR 18): what is withheld meanwhile, and how the order reaches a worker."""
