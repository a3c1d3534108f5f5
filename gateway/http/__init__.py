"""What stands around the routes: connections, bodies, credentials, one shape for every error."""
