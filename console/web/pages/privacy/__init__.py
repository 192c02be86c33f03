"""Pages of data protection: subject requests as cases, and erasures."""
