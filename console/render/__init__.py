"""Documents as HTML and PDF: templates, tables, charts and numbers, fonts, and the PDF process."""
