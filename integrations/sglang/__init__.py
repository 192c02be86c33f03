"""SGLang under governance: a radix cache backend, and what it needs of the scheduler and of the HTTP server."""
