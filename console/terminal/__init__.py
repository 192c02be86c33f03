"""What commands show: help, tables and progress. A command imports it when it shows something."""
