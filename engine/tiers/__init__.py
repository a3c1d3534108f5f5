"""Where leases live outside the KV pool: host memory and disk."""
