"""Entry keys: one SHA-256 for the prefix that ends at each block."""

from hashlib import sha256

from gateway.prompts.rendered_prompt import RenderedPrompt


def scope(*, workspace_id: str, model_id: str, weights_digest: str) -> bytes:
    """Who may share an entry, as the bytes hashed in front: three length-prefixed strings."""
    parts = [part.encode() for part in (workspace_id, model_id, weights_digest)]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def entry_keys(scope: bytes, rendered: RenderedPrompt) -> tuple[str, ...]:
    """The key of each block's prefix, in block order; the prompt is hashed once."""
    digest = sha256(scope)
    keys = []
    start = 0
    for end in rendered.block_ends:
        digest.update(rendered.token_ids[start * 4 : end * 4])
        keys.append(digest.copy().hexdigest())
        start = end
    return tuple(keys)
