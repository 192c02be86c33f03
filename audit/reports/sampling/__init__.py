"""The population of a report and its sample: strata, size from stated risk, seeded draws, leaves with proofs."""
