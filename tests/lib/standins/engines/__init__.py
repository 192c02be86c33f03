"""What the suites of real engines share."""
