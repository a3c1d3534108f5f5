"""Prefix hashes: SHA-256 of the prompt up to the end of each content block, the entries' keys."""

from hashlib import sha256

from gateway.prompts.rendered_prompt import RenderedPrompt


def scope(*, workspace_id: str, model_id: str, weights_digest: str) -> bytes:
    """Return the bytes that are hashed first, and that bound the sharing of entries."""
    parts = [part.encode() for part in (workspace_id, model_id, weights_digest)]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def entry_keys(scope: bytes, rendered: RenderedPrompt) -> tuple[str, ...]:
    """Return the key of each block's prefix, in block order; the prompt is hashed once."""
    digest = sha256(scope)
    keys = []
    start = 0
    for end in rendered.block_ends:
        digest.update(rendered.token_ids[start * 4 : end * 4])
        keys.append(digest.copy().hexdigest())
        start = end
    return tuple(keys)
