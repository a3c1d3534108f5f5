"""Tasks that run beside the requests: recovery, lease costs, the sweep of expired entries."""
