"""Wire types of the Messages API: pure pydantic models."""
