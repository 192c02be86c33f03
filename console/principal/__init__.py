"""`kvcustody principal` and `kvcustody apikey`: who may ask a control plane."""
