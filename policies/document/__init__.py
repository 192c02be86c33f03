"""The policy document: its typed form, the YAML it is read from, its digest, and its possible problems."""
