"""Plans executed: the KV cache, attention, sampling."""
