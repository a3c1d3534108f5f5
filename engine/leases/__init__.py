"""Leases: prefixes whose KV is kept until a deadline, within limits, and what that costs."""
