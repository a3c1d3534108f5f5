"""What surrounds the routes: connections, request ids, bodies, credentials, streams, errors."""
