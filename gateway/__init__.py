"""The Messages-API-compatible front: who may ask, what it cost, what goes back."""
