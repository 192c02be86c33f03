"""An engine's server without a model: a governed pool behind its own door, for fleets that are tried on one machine."""
