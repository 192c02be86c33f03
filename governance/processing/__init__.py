"""The record of processing activities (GDPR 30): its content, how it is made and signed, and how it is checked."""
