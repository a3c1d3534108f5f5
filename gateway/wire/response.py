"""Response bodies: the Message, its usage, models, errors."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class ResponseModel(BaseModel):
    """A response body; a missing value is sent as null, unless its field excludes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheCreation(ResponseModel):
    """Tokens written to the cache, by TTL class."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class Usage(ResponseModel):
    """What the request is billed for.

    Read + creation + input is the whole prompt; creation is the sum of its two classes.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"] = "standard"
    inference_geo: str = "not_available"


class TextContent(ResponseModel):
    """A text block of the output."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Message(ResponseModel):
    """A whole message, or the empty start of a streamed one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[TextContent, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    usage: Usage


class TokenCount(ResponseModel):
    """The response of count_tokens."""

    input_tokens: int


class ErrorDetail(ResponseModel):
    """What went wrong; `details.error_code` picks a finer exception class in the SDK."""

    type: str
    message: str
    details: dict[str, str] | None = Field(default=None, exclude_if=lambda value: value is None)


class ErrorBody(ResponseModel):
    """The one shape of every error, on every route and in the stream."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str


class ModelInfo(ResponseModel):
    """One served model, as `/v1/models` lists it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None
    max_input_tokens: int
    max_tokens: int
    capabilities: None = None


class ModelPage(ResponseModel):
    """A page of models."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None
