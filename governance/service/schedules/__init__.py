"""Reports that are made by a calendar, and handed over where the settings say."""
