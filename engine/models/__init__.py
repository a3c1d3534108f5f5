"""Model architectures: what each reads from config.json, and its mathematics."""
