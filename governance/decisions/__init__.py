"""Who may read and write what: plans, the decision behind each reuse, and what a new policy revision changes."""
