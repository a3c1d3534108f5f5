"""What each step computes for which sequences, and in which KV blocks."""
