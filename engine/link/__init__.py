"""The engine's end of the link: server, frames, wire form, addresses."""
