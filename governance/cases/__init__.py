"""Cases of people's requests: what opens one, what each step is held against, and how one is shown."""
