"""What waits for somebody: approvals, consents, missed erasures, and what is about to end."""
