"""Reading a policy document into its typed form, one section a file; every complaint carries its place."""
