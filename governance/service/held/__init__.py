"""Questions of workers that are held open: what they wait for, and what they are told."""
