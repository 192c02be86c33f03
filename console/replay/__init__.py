"""`kvcustody replay`: its options and the printing of its figures; `kvcustody.lab.replay` runs it."""
