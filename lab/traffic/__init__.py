"""Simulated traffic: a worker that serves a generated workload, and people who use its control plane."""
