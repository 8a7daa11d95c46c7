"""What benchmark.py measures, one subcommand a file, and what the subcommands share."""
