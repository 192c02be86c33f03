"""What travels over the API, as models: the one place where its JSON is defined."""
