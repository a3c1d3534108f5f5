"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`.

A null optional field is an absent one. Unknown fields are refused, and so are the fields of the
Messages API that this server does not support yet: silently ignoring them would change what the
client pays for. A string is one text block; everything behind this file sees blocks only.
"""

from typing import Annotated, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

ApiVersion = Literal["2023-06-01", "2026-10-21"]
Role = Literal["user", "assistant", "system"]
TtlClass = Literal["5m", "1h"]

MAX_MESSAGES = 100_000  # the API's own limit
MAX_TOP_K = 2**31 - 1  # larger than any vocabulary, and the engine link carries it
MAX_STOP_SEQUENCES = 128  # each is searched for in every piece of output
MAX_SYSTEM_BLOCKS = 100_000  # they may be empty, so the context window does not bound them

UNKNOWN_FIELD = "unknown_field"  # where the context of a fault about a field has its name


class Strict(BaseModel):
    """A wire object that takes exactly its own fields, and never changes."""

    # Unknown fields are taken in and then refused: "forbid" would make a fault of each.
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unknown_field(self) -> Self:
        _require_own_fields(self)
        return self


def _require_own_fields(model: BaseModel) -> None:
    for name in model.model_extra or ():
        raise PydanticCustomError(
            "extra_forbidden", "Extra inputs are not permitted", {UNKNOWN_FIELD: name}
        )


def _refuse_unless_absent(value: object) -> None:
    if value is not None and value != []:
        raise PydanticCustomError("unsupported", "This server does not support this field yet")


def _as_blocks(value: object) -> object:
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    if isinstance(value, list):
        return tuple(value)  # strict mode: a validator's result is no longer JSON
    if value is None:
        return None
    raise PydanticCustomError("string_or_list", "Input should be a valid string or list")


def _sampling_field(value: object, info: ValidationInfo) -> object:
    if value is not None and info.context and info.context["version"] == "2026-10-21":
        raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted")
    return value


NotYet = Annotated[None, BeforeValidator(_refuse_unless_absent)]
"""A field of the API that this server refuses, unless it is null or an empty list."""

SAMPLING_FIELD = BeforeValidator(_sampling_field)
"""Marks a field that the API dropped with version 2026-10-21."""


class CacheControl(Strict):
    """A cache marker; without `ttl` it asks for five minutes."""

    type: Literal["ephemeral"]
    ttl: TtlClass | None = None

    @property
    def ttl_class(self) -> TtlClass:
        """The TTL class the marker asks for."""
        return "5m" if self.ttl is None else self.ttl


class TextBlock(Strict):
    """A text block, in `system` or in a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: NotYet = None


class UnsupportedBlock(BaseModel):
    """A content block that the Messages API knows and this server does not support yet."""

    model_config = ConfigDict(frozen=True)

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        _require_own_fields(self)
        raise PydanticCustomError(
            "unsupported", "This server does not support {kind} blocks yet", {"kind": self.type}
        )


class ThinkingBlock(UnsupportedBlock):
    """A thinking block passed back; the API refuses a marker on it before anything else."""

    model_config = ConfigDict(extra="allow")

    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(UnsupportedBlock):
    """A redacted thinking block passed back; see ThinkingBlock."""

    model_config = ConfigDict(extra="allow")

    type: Literal["redacted_thinking"]
    data: str


class OtherBlock(UnsupportedBlock):
    """Every other kind; what it holds does not matter."""

    type: Literal[
        "image",
        "document",
        "search_result",
        "tool_use",
        "tool_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "container_upload",
    ]


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | OtherBlock,
    Field(discriminator="type"),
]
Content = Annotated[tuple[ContentBlock, ...], FailFast(), BeforeValidator(_as_blocks)]
System = Annotated[
    tuple[TextBlock, ...] | None,
    FailFast(),
    Field(max_length=MAX_SYSTEM_BLOCKS),
    BeforeValidator(_as_blocks),
]


class InputMessage(Strict):
    """One message; `content` as sent, a string made one text block."""

    role: Role
    content: Content

    @property
    def text_blocks(self) -> tuple[TextBlock, ...]:
        """The content: every other kind of block has been refused by now."""
        return cast("tuple[TextBlock, ...]", self.content)


class Metadata(Strict):
    """Opaque to us: accepted, never read."""

    user_id: str | None = None


class ThinkingDisabled(Strict):
    """The one thinking configuration of a model that does not think."""

    type: Literal["disabled"]


class OutputConfig(Strict):
    """How output is shaped; nothing of it is supported yet."""

    effort: NotYet = None
    format: NotYet = None


class PromptRequest(Strict):
    """The fields that shape the prompt, and so its length and its cache entries."""

    model: str
    messages: Annotated[tuple[InputMessage, ...], FailFast(), Field(max_length=MAX_MESSAGES)]
    system: System = None
    cache_control: CacheControl | None = None
    thinking: ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    tools: NotYet = None
    tool_choice: NotYet = None
    speed: Literal["standard"] | None = None


class CountTokensRequest(PromptRequest):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(PromptRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0)]
    stream: bool | None = None
    stop_sequences: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | None,
        FailFast(),
        Field(max_length=MAX_STOP_SEQUENCES),
    ] = None
    temperature: Annotated[float | None, Field(ge=0, le=1), SAMPLING_FIELD] = None
    top_p: Annotated[float | None, Field(gt=0, le=1), SAMPLING_FIELD] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_TOP_K), SAMPLING_FIELD] = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: NotYet = None
    diagnostics: NotYet = None
    inference_geo: NotYet = None
