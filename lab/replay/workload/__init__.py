"""Generated workloads, and the tenants that a trace's requests are given."""
