"""`kvcustody policy`: author, review and release the policy; one noun per file, apart from the library."""
