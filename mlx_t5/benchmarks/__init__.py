"""The subcommands of benchmark.py, one file each, and the modules that they share."""

REQUIREMENTS = "requirements/benchmark.txt"  # packages that only some subcommands need
