"""The control plane over HTTP: OpenAPI 3.1, version 1. Needs the extra `service`."""
