"""The modules of the product and their imports."""
