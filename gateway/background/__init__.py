"""Tasks that run beside the requests: ownership, recovery, lease costs, the sweep."""
