"""The output of `kvcustody routes`."""
