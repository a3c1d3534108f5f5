"""From a conversation to token ids: content blocks, breakpoints, chat template, prefix hashes."""
