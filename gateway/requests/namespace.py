"""The server secret, and the engine namespaces derived from it."""

import hmac
import os
import secrets
from pathlib import Path

from gateway.errors import ServerSecretError

SECRET_BYTES = 32


def load_server_secret(path: Path) -> bytes:
    """Read the secret, made and kept (0600) the first time; two starts at once agree on one.

    Raises ServerSecretError for a file that was cut: an empty secret would still make namespaces.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails if another start was first: then its secret counts
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        problem = f"{len(secret)} bytes instead of {SECRET_BYTES}"
        raise ServerSecretError(f"{path} is damaged ({problem}): restore it, or remove it")
    return secret


def namespace(
    secret: bytes, *, organization_id: str, workspace_id: str, model_id: str, weights_digest: str
) -> bytes:
    """The engine's opaque isolation key; nothing that a client sends can choose it."""
    parts = [p.encode() for p in (organization_id, workspace_id, model_id, weights_digest)]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")
