"""How a policy revision comes into effect: proposed, approved, activated, rolled back, and taken over by workers."""
