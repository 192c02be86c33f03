"""What tools for governance take in of a report: OSCAL documents that import each other, a table, and folders."""
