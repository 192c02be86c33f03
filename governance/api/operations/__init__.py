"""The operations of the API by subject; each is a function of the caller, the service and its parameters."""
