"""Output of commands: help, tables and progress. A command imports it when it prints."""
