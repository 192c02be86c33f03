"""Hourly sums of leaves, kept beside them so that pages and scrapes read figures instead of leaves."""
