"""Copies of leases outside the KV pool, in host memory and on disk."""
