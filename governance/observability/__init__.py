"""What a running process says of itself: logs without secrets, metrics, counters, the record of processing."""
