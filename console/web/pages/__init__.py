"""The pages of the operator console, one subject per module: each function answers one request."""
