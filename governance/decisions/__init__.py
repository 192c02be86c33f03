"""Decisions: plans, the decision behind each reuse, and the changes of a new policy revision."""
