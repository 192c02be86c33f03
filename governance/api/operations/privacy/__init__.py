"""Operations of data protection: cases of people's requests, and records of processing."""
