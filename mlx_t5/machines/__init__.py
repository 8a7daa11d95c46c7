"""Several machines, or several processes of one: one model over them, or one file."""
