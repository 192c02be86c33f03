"""An online change: tables of leaves' rows get a new form while others write and read."""
