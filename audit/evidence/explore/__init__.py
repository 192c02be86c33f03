"""The data behind the explorer page: leaves of all logs by time, and counts by facet and time."""
