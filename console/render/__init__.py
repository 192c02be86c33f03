"""Documents as HTML and PDF: templates, tables, charts and numbers, fonts, and what makes a PDF of a page."""
