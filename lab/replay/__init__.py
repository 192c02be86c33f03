"""Replays of traces: a recorded or generated workload, labelled with tenants, driven through the Governor, reported."""
