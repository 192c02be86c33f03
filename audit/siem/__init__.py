"""The ledger's leaves for security monitoring: OCSF and CloudEvents, pulled by cursor or pushed to sinks."""
