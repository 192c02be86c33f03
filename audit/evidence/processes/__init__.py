"""The processes of a ledger, from signed leaves: when each was at work, what it enforces, and which replay history."""
