"""The block manager that an engine calls for each request, with reclaiming, checks and repair."""
