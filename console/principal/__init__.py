"""`kvcustody principal` and `kvcustody apikey`: the principals of a control plane."""
