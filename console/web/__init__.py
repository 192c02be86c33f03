"""The operator console: pages made on the server, from the service's own answers, behind the same gate."""
