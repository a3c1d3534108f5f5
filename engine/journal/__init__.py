"""What the engine did, on disk before any frame tells of it."""
