"""`kvcustody case`: requests of people about their data, from receipt to the letter."""
