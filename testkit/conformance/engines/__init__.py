"""Engines for the kit without a model: a toy scheduler and device over the Governor or the engine port."""
