"""A report's files for governance tools: OSCAL documents that import each other, a table, and folders."""
