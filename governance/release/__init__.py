"""Policy releases: proposal, approval, activation, rollback, and their way to workers."""
