"""The people behind pseudonyms: the directory, the tables of subjects, and the store of their keys."""
