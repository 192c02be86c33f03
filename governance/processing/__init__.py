"""The record of processing activities (GDPR 30): what it says, how it is made and signed, and how it is checked."""
