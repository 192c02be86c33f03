"""Key services behind the wrapping port: one module each, over the service's own interface."""
