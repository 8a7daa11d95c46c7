"""The subcommands of benchmark.py, one file each, and the modules that they share."""
