"""`kvcustody up`: a whole control plane with a simulated worker on this machine, for the first ten minutes."""
