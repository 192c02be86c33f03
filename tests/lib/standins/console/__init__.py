"""The console in a test: pages, commands, receivers."""
