"""The population of a report and its sample: strata, size from stated risk, draws by a seed, leaves with proofs."""
