"""What the ledger's leaves add up to by hour, kept beside them, so that a page or a scrape reads figures and no leaf."""
