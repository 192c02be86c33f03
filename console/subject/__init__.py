"""`kvcustody subject`: one subject's page, for a data-protection officer."""
