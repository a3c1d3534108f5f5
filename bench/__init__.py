"""Exhibits: each file measures one claim with one command, and checks the figures first."""
