"""What benchmark.py measures, one subcommand a file, and what the subcommands share."""

REQUIREMENTS = "requirements/benchmark.txt"  # what only some subcommands need
