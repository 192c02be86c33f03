"""Scheduled reports: made by a calendar, and delivered to the destinations of the settings."""
