"""Key services behind the wrapping port: one module per service, over the service's own interface."""
