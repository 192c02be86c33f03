"""Reading a policy document: its declaration, and its typed form built from it; every complaint carries its place."""
