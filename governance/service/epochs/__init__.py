"""Erase epochs as the control plane raises them, gives them out and knows who follows."""
