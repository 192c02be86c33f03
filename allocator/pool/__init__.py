"""Physical blocks: their states, who is charged for them, the holds on them, and the way from ended to CLEAN."""
