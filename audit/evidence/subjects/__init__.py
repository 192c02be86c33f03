"""Who is behind a pseudonym: the directory, the tables of subjects, and the store of their keys."""
