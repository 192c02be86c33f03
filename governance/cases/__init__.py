"""Cases of people's requests: opening one, checking its steps, showing it."""
