"""Models of everything that the API sends and takes: the one place where its JSON is defined."""
