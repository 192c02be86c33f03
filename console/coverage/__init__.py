"""`kvcustody coverage`: deletion coverage, and its recomputation from leaves."""
