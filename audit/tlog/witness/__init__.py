"""A witness: a party other than a log's operator that signs that the log only grew (C2SP tlog-witness)."""
