"""What a shell and `man` know of the commands: completions and the manual page, as files."""
