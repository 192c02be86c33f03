"""Workers' latest status in a terminal: `kvcustody top` and `kvcustody advise`."""
