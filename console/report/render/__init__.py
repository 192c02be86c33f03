"""A page as HTML and PDF: its parts, charts and numbers, and what sets them."""
