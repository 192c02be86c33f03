"""Scripts that ask serving engines."""
