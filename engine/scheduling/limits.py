"""Validates requests at submit: a request that passes can be served by this engine."""

import math

import numpy as np

from engine.blocks.prefix_index import TOKEN_BYTES
from engine.config import EngineConfig
from engine.protocol import GenerateRequest, RejectCode, Rejected

MAX_TTL_MS = 7 * 24 * 3_600_000  # far above every cache entry's
MAX_BREAKPOINTS = 256  # keeps a record far below a frame: each breakpoint has a grant in it


def find_fault(request: GenerateRequest, config: EngineConfig) -> Rejected | None:
    """Return why this engine can never serve the request; None: it can."""
    if (message := _find_malformed(request, config)) is not None:
        return Rejected(request.request_id, "invalid_request", message)
    # The minimum: its prompt, and one token if it asks for any.
    num_tokens = request.num_prompt_tokens + min(request.max_tokens, 1)
    code: RejectCode
    if num_tokens > config.max_model_len:
        code, limit = "prompt_too_long", config.max_model_len
    elif num_tokens > config.max_request_tokens:
        code, limit = "pool_too_small", config.max_request_tokens
    else:
        return None
    message = f"Prompt does not fit: {request.num_prompt_tokens} tokens of {limit}"
    return Rejected(request.request_id, code, message)


def clamp_max_tokens(request: GenerateRequest, config: EngineConfig) -> int:
    """Return the request's `max_tokens`, reduced to what fits after its prompt."""
    return min(request.max_tokens, config.max_request_tokens - request.num_prompt_tokens)


def _find_malformed(request: GenerateRequest, config: EngineConfig) -> str | None:
    """Return what is malformed, as one sentence; None: nothing."""
    if not request.namespace:
        return "The namespace is empty"
    return (
        _find_bad_prompt(request.prompt_token_ids, config.vocab_size)
        or _find_bad_length(request)
        or _find_bad_breakpoint(request)
        or _find_bad_sampling(request)
    )


def _find_bad_prompt(prompt: bytes, vocab_size: int) -> str | None:
    if not prompt:
        return "The prompt is empty"
    if len(prompt) % TOKEN_BYTES:
        return f"The prompt is not packed u32: {len(prompt)} bytes"
    highest = int(np.frombuffer(prompt, dtype="<u4").max())
    if highest >= vocab_size:
        return f"Token id out of vocabulary: {highest}"
    return None


def _find_bad_length(request: GenerateRequest) -> str | None:
    if request.max_tokens < 0:
        return f"max_tokens is negative: {request.max_tokens}"
    if not 0 <= request.read_tokens <= request.num_prompt_tokens:
        return f"read_tokens outside the prompt: {request.read_tokens}"
    return None


def _find_bad_breakpoint(request: GenerateRequest) -> str | None:
    if len(request.breakpoints) > MAX_BREAKPOINTS:
        return f"More than {MAX_BREAKPOINTS} breakpoints: {len(request.breakpoints)}"
    previous = 0
    for breakpoint_ in request.breakpoints:
        if not previous < breakpoint_.num_tokens <= request.num_prompt_tokens:
            return f"Breakpoint out of order or outside the prompt: {breakpoint_.num_tokens}"
        if breakpoint_.ttl_ms < 0:
            return f"Breakpoint with a negative ttl: {breakpoint_.ttl_ms}"
        if breakpoint_.ttl_ms > MAX_TTL_MS:
            return f"Breakpoint with a ttl over {MAX_TTL_MS} ms: {breakpoint_.ttl_ms}"
        previous = breakpoint_.num_tokens
    return None


def _find_bad_sampling(request: GenerateRequest) -> str | None:
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is not a number from 0 up: {sampling.temperature}"
    if not 0 <= sampling.top_p <= 1:  # 0 keeps only the likeliest token
        return f"top_p is not from 0 to 1: {sampling.top_p}"
    if sampling.top_k < 0:
        return f"top_k is negative: {sampling.top_k}"
    return None
