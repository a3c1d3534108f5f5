"""The KV blocks: reference counts, eviction order, and the prefix that each block holds."""
