"""A paged LLM engine: token ids in, token ids out; knows nothing of money, HTTP or customers."""
