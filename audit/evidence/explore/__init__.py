"""What a page that explores the ledger reads: leaves of all logs by time, what there is of each sort, and when."""
