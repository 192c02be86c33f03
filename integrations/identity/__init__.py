"""Request identity: authentication in front of an HTTP server, and scope tokens for the engine behind it."""
