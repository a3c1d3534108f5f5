"""Exhibits: one file a claim, each measured by one command and checked before it is shown."""
