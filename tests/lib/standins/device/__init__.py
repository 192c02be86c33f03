"""A device without one: CUDA and Triton below our own code."""
