"""What `kvcustody routes` prints."""
