"""`kvcustody simulate`: a fleet's expected cache hits, modelled faster than real time."""
