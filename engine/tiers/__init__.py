"""Copies of leases outside the KV pool, in host memory and on disk, and when they pay."""
