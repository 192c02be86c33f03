"""The wire of the API: the gate before every operation, routes, sessions, and the server itself."""
