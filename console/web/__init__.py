"""The operator console: pages rendered on the server from the service's answers, behind the same gate."""
