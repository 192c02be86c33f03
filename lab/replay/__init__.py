"""Replays: a recorded or generated workload, labelled with tenants, runs through the Governor and is reported."""
