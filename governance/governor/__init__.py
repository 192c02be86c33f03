"""Governor."""
