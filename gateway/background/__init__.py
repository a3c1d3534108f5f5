"""What runs beside the requests: recovery, lease costs, the sweep of expired entries."""
