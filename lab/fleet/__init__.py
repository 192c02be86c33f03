"""A fleet on one machine: routers' programs, the processes around them, and a model of them in fast time."""
