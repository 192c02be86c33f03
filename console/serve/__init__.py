"""`kvcustody serve` and `kvcustody init`: the control plane of one ledger."""
