"""The engine's side of the link: server loop, client sockets, frame format, addresses."""
