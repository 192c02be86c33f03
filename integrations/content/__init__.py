"""The declared kinds of a request's content, from its caller and its messages' roles, and their transport."""
