"""Service health: one verdict behind readiness, health, metrics and the inbox."""
