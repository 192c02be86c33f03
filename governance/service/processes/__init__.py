"""Processes of the service for work that would block its interpreter."""
