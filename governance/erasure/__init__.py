"""An erasure in one process: what it selects, its run until everything is zero, and the requests a ledger holds."""
