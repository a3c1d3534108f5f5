"""The engine namespace of a request: an HMAC under the server secret."""

import hmac


def namespace(
    secret: bytes, *, organization_id: str, workspace_id: str, model_id: str, weights_digest: str
) -> bytes:
    """The engine's opaque isolation key; nothing that a client sends can choose it."""
    parts = [p.encode() for p in (organization_id, workspace_id, model_id, weights_digest)]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")
