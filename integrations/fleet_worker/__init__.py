"""An engine server without a model: a governed pool behind its own door, for fleets on one machine."""
