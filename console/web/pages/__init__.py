"""The pages of the operator console, one subject a module: each function answers one request."""
