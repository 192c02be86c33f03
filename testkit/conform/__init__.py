"""Public bugs of cache layers as cases: found in an installed product or not, each by a script of its own."""
