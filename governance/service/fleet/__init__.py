"""The workers of a control plane: registrations, reports, scans, keys, releases and webhooks."""
