"""`kvcustody erasure`: request an erasure, see who has answered, and get and check its certificate."""
