"""The subcommands of `mlx_t5.benchmark`, one file each, and the modules that they share."""
