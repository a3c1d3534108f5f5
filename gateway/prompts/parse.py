"""From a request body to a prompt with cache breakpoints, for messages and for count_tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import InvalidRequest
from gateway.prompts.breakpoints import CacheBreakpoint, effective_breakpoints, read_markers
from gateway.prompts.conversation import Block
from gateway.prompts.model_catalog import Catalog, ServedModel
from gateway.prompts.rendered_prompt import RenderedPrompt
from gateway.wire.request import PromptRequest

# Texts up to these lengths are tokenised at once: most prompts that fit, and what takes 64 MB then.
USUAL_CHARACTERS_PER_TOKEN = 4
MAX_CHARACTERS_AT_ONCE = 160_000
PIECE_CHARACTERS = 16 << 10  # some 6 MB while it is tokenised


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A valid prompt: known model, valid markers, within the context window."""

    model: ServedModel
    rendered: RenderedPrompt
    breakpoints: tuple[CacheBreakpoint, ...]


def parse_prompt(
    request: PromptRequest, blocks: Sequence[Block], *, catalog: Catalog
) -> ParsedPrompt:
    """Find the model, read the markers of the request's blocks, render them.

    A long prompt takes seconds: run it in `prompt_threads.py`. Raises InvalidRequest or NotFound.
    """
    model = catalog.find(request.model)
    markers = read_markers(blocks, automatic=request.cache_control)
    _require_fit(model, num_tokens=_fewest_tokens(model, blocks))
    _require_fit_by_pieces(model, blocks)
    rendered = model.chat_template.render(blocks)
    _require_fit(model, num_tokens=rendered.num_tokens)
    breakpoints = effective_breakpoints(markers, rendered, min_tokens=model.min_cache_tokens)
    return ParsedPrompt(model, rendered, breakpoints)


def _fewest_tokens(model: ServedModel, blocks: Sequence[Block]) -> int:
    """Return a cheap lower bound.

    A block ends where a token ends, so each is rounded up: many short blocks are many tokens.
    """
    longest = model.tokenizer.longest_token_bytes
    return sum(-(-len(block.text.encode()) // longest) for block in blocks)


def _require_fit_by_pieces(model: ServedModel, blocks: Sequence[Block]) -> None:
    """Refuse a long text that is far too many tokens before all of it is tokenised.

    Tokenising takes 400 bytes of memory a token, and a token may be one byte. So a text that could
    be many times the window is counted in pieces first. A cut between two pieces adds a few tokens,
    far fewer than as many again.
    """
    usual_characters = USUAL_CHARACTERS_PER_TOKEN * model.context_window_tokens
    if sum(len(block.text) for block in blocks) <= min(usual_characters, MAX_CHARACTERS_AT_ONCE):
        return
    num_tokens = 0
    for block in blocks:
        for start in range(0, len(block.text), PIECE_CHARACTERS):
            piece = block.text[start : start + PIECE_CHARACTERS]
            num_tokens += len(model.tokenizer.encode(piece))
            if num_tokens > 2 * model.context_window_tokens:
                _require_fit(model, num_tokens=num_tokens)


def _require_fit(model: ServedModel, *, num_tokens: int) -> None:
    if num_tokens > model.context_window_tokens:
        raise InvalidRequest(
            f"prompt is too long: {num_tokens} tokens > {model.context_window_tokens} maximum"
        )
