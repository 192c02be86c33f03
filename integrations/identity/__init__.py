"""Who a request is: authentication at the door of an HTTP server, and scope tokens for the engine behind it."""
