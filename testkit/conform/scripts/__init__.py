"""Scripts that anyone can run: each looks for one public bug in one installed product, and prints what it saw."""
