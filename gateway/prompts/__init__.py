"""From a conversation to token ids: blocks, cache breakpoints, chat template, prefix hashes."""
