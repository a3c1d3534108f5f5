"""The engine's end of the link: server, connections, frames, addresses."""
