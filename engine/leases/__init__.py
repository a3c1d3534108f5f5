"""Prefixes kept until a deadline: what is granted, held, pinned and reported."""
