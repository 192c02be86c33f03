"""SGLang under governance: a radix cache backend, with its hooks into the scheduler and the HTTP server."""
