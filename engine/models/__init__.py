"""Model architectures: the configuration and the mathematics of each family."""
