"""Executes plans: a loaded model, its KV cache, attention, sampling."""
