"""What happens to custody, and how it is recorded: each kind of event as plain data."""
