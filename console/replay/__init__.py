"""Trace replays: read or generate a workload, label it with tenants, drive the Governor with it, report what
happened.
"""
