"""The operator console: server-rendered pages on the service's own answers, behind the same gate."""
