"""Several machines, or several processes on one: they share a model or a file."""
