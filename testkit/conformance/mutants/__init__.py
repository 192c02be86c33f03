"""Historic bugs as patches, by engine, and the runner that shows that the kit detects each."""
