"""The engine's journal: its record of every request and lease, on disk before any frame is sent."""
