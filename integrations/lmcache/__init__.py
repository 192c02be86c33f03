"""LMCache's server under governance: what its second tier keeps is sealed, counted, and ends as policy says."""
