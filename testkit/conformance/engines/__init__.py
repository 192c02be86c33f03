"""Engines that the kit runs on without a model: a toy scheduler and device over the Governor or the engine port."""
