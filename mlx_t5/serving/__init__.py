"""The HTTP server behind server.py: endpoints, a queue of jobs, and the thread that decodes."""
