"""What a request's content is said to be, by its caller and by the roles of its messages, and how that travels."""
