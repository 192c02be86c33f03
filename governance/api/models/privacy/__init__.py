"""Models of data protection: cases and records of processing, as the API shows them."""
