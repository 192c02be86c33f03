"""Pages of data protection: requests of people as cases."""
