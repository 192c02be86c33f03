"""One replay: its environment, its steps through the Governor, and the comparison with golden figures."""
