"""The door in front of a router: one core (`edge_gate`) with several transports."""
