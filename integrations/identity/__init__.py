"""Who a request is: authentication before an HTTP server, and scope tokens for the engine behind it."""
