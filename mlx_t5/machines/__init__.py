"""Runs on several machines, or in several processes of one, that share a model or a file."""
