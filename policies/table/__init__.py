"""The decision table: a policy compiled into look-ups for one request or many, and the obligations for each block."""
