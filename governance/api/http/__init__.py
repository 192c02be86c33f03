"""HTTP for the API: the gate before every operation, routes, sessions, and the server."""
