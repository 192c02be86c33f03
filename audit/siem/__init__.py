"""The ledger's leaves for security monitoring: OCSF and CloudEvents, pulled from a cursor or pushed to sinks."""
