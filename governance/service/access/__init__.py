"""Access to the service: principals, API keys, tokens, sessions, roles and rate limits."""
