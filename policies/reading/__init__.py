"""Read a policy document: its declaration, and the typed form built from it. Every complaint has a place."""
