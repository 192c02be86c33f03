"""`kvcustody tier`: decisions about moving copies between the device and its tiers."""
