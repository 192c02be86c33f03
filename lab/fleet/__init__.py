"""A fleet on one machine: router programs, the processes around them, and a model that runs faster than real time."""
