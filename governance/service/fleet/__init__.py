"""The workers of a control plane: their registrations, reports, scans, keys, releases and webhooks."""
