"""The policy workbench: library calls that answer authors' and reviewers' questions with typed data."""
