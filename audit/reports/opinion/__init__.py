"""The opinion on a report's first page: what qualifies it, between which bounds the truth is, and who answers."""
