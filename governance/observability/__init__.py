"""What a running process reports: logs without secrets, metrics, counters, the record of processing."""
