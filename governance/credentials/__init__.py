"""Credentials of both doors, the service's and an engine's: API keys, JSON Web Tokens, issuers' keys, scope tokens."""
