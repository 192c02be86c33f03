"""`kvcustody simulate`: what a fleet would find in its caches, in fast time."""
