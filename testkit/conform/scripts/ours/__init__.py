"""The same questions, asked of ours."""
