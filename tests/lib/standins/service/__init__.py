"""The control plane in a test, its clients and its processes."""
