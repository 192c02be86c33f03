"""Simulated traffic: a worker that serves a generated workload, and the people who ask of its control plane."""
