"""An order: one validated request with its prompt in token ids, ready for its hold."""

from dataclasses import dataclass

from billing.customers import Caller
from engine.client import EngineInfo
from gateway.errors import EngineReplaced, InvalidRequest
from gateway.prompts.model_catalog import ServedModel
from gateway.prompts.parse import ParsedPrompt
from gateway.prompts.prefix_hash import entry_keys, scope
from gateway.wire.request import MessagesRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A valid request: parsed, rendered, and within the engine's limits.

    entry_keys      one for each block of the prompt
    max_tokens      the output budget: what the client asked, clamped to what the window leaves
    ignore_eos      whether the model's end-of-turn token is ignored
    started_at_ms   taken once, when the body has arrived: every entry's lifetime runs from it
    """

    request_id: str
    message_id: str
    caller: Caller
    workspace_id: str
    body: MessagesRequest
    prompt: ParsedPrompt
    entry_keys: tuple[str, ...]
    engine_info: EngineInfo
    max_tokens: int
    ignore_eos: bool
    started_at_ms: int

    @property
    def is_clamped(self) -> bool:
        """Whether the window, not the client, bounds the output."""
        return self.max_tokens < self.body.max_tokens


def place_order(
    body: MessagesRequest,
    prompt: ParsedPrompt,
    *,
    caller: Caller,
    engine_info: EngineInfo,
    request_id: str,
    message_id: str,
    ignore_eos: bool,
    started_at_ms: int,
) -> Order:
    """Check the request against the engine's limits. Raises InvalidRequest or EngineReplaced."""
    assert caller.workspace_id is not None, "only a customer key orders, and it has a workspace"
    require_model(engine_info, prompt.model)
    if body.max_tokens == 0 and body.stream:
        raise InvalidRequest("must be false when max_tokens is 0", path="stream")
    model = prompt.model
    num_tokens = prompt.rendered.num_tokens
    window_tokens = min(model.context_window_tokens, engine_info.max_request_tokens)
    if num_tokens > window_tokens:
        raise InvalidRequest(f"prompt is too long: {num_tokens} tokens > {window_tokens} maximum")
    cache_scope = scope(
        workspace_id=caller.workspace_id, model_id=model.id, weights_digest=model.weights_digest
    )
    return Order(
        request_id=request_id,
        message_id=message_id,
        caller=caller,
        workspace_id=caller.workspace_id,
        body=body,
        prompt=prompt,
        entry_keys=entry_keys(cache_scope, prompt.rendered),
        engine_info=engine_info,
        max_tokens=min(body.max_tokens, window_tokens - num_tokens),
        ignore_eos=ignore_eos,
        started_at_ms=started_at_ms,
    )


def require_model(engine_info: EngineInfo, model: ServedModel) -> None:
    """Require that the engine runs this model. Raises EngineReplaced."""
    if not model.is_run_by(engine_info):
        raise EngineReplaced("The engine was started with another model; try again later")
