"""Continuous batching in custody: the engine's paged cache, scheduler and manager over a Governor's blocks."""
