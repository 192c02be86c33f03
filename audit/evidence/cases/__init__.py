"""Requests of people about their data as cases: their clock, their steps from leaves, and what each may follow."""
