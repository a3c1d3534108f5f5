"""What `verify` checks, one file a subject; each yields one sentence a problem."""
