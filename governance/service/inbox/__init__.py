"""Open tasks: approvals, consents, missed erasures, and what ends soon."""
