"""Lets several machines, or several processes on one machine, share a model or a file."""
