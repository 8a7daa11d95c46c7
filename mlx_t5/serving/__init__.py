"""The parts of server.py."""
