"""Plans executed: a model loaded, its KV cache, attention, sampling."""
