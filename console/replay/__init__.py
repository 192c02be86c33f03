"""`kvcustody replay`: its options, and how its figures are printed; what it runs is `kvcustody.lab.replay`."""
