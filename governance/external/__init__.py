"""Custody beside an engine that allocates by itself: the port that its adapter calls, and the parts the port owns."""
