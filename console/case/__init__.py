"""`kvcustody case`: subject requests about personal data, from receipt to the letter."""
