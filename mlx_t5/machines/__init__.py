"""Lets several machines, or several processes on one machine, decode with one shared model."""
