"""What leaves add up to by hour, kept beside them: a page or a scrape reads figures, and no leaf."""
