"""The decision table: a policy compiled into look-ups, for one request or many, and what is owed for a block."""
