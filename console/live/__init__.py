"""What workers last said of themselves, in a terminal: `kvcustody top` and `kvcustody advise`."""
