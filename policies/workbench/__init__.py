"""The policy workbench: what authors and reviewers ask of a policy, as library calls that return typed data."""
