"""Physical blocks: their states, the accounts charged for them, the holds on them, and the path from ended to CLEAN."""
