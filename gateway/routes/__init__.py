"""One file a resource: from an HTTP request to the calls below, and back."""
