"""`kvcustody erasure`: requests erasures, shows workers' answers, and issues and checks certificates."""
