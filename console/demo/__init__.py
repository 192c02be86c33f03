"""`kvcustody demo`: whole fleets on this machine, and other packages' demonstrations with engines."""
