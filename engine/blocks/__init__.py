"""The KV blocks: who uses each one, and which prefix it holds."""
