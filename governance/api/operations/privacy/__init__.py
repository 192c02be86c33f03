"""Operations of data protection: requests of people as cases, and records of processing."""
