"""Whether a service does what it is for: one verdict behind readiness, health, metrics and the inbox."""
