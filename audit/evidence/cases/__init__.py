"""People's requests about their data as cases: their clock, their steps from leaves, and the order of steps."""
