"""The control plane without HTTP: callers, stored state, and how workers hand in their ledgers."""
