"""`kvcustody tier`: what was decided about moving copies between the device and its tiers."""
