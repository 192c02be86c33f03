"""`kvcustody size`: the sizes of a model's cache and of its audit record."""
