"""One replay: what it stands on, its steps through the Governor, and its figures against the golden ones."""
