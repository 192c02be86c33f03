"""The custody core: what ends, limits and compares what is held, over whichever pool holds it."""
