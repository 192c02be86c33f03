"""`kvcustody demo`: whole fleets on this machine, and what other packages show of engines."""
