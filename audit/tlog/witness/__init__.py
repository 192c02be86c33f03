"""A witness: somebody other than a log's operator who signs that the log only grew (C2SP tlog-witness)."""
