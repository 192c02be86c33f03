"""The door before a router: one core (`edge_gate`), and its skins."""
