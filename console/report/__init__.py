"""`kvcustody report`: evidence reports as HTML, PDF, JSON and OSCAL."""
