"""Generated workloads, and the assignment of tenants to a trace's requests."""
