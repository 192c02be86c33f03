"""`kvcustody policy`: author, review and release the policy; one noun a file, rendering apart from the library."""
