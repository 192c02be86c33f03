"""An online change: tables of leaves' rows get a new form beside the old one while others write and read."""
