"""What travels between a client and the gateway, as pydantic models."""
