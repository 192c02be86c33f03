"""Released policies and the workers that take them."""
