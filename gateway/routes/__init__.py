"""HTTP routes, one file a resource."""
