"""Several machines, or several processes of one, that compute one model together."""
