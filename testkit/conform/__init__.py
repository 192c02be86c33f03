"""Public bugs of cache layers as cases: a script per product looks for each of them in the installed version."""
