"""A prompt from its bytes: read within its shares, then parsed in a thread."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import Request

from billing.customers import Caller
from gateway.http.auth import dependencies_of
from gateway.http.bodies import read_bytes
from gateway.http.body_bytes import BodyBytes
from gateway.http.validation import read_body
from gateway.prompts.conversation import read_blocks
from gateway.prompts.parse import ParsedPrompt, parse_prompt
from gateway.prompts.uncollected import uncollected
from gateway.wire.request import ApiVersion, PromptRequest

Body = TypeVar("Body", bound=PromptRequest)


@dataclass(frozen=True, slots=True)
class ReceivedPrompt(Generic[Body]):
    """A valid body, without the conversation that `prompt` is made of.

    `arrived_at_ms` is when its last byte was read.
    """

    body: Body
    prompt: ParsedPrompt
    arrived_at_ms: int


async def receive_prompt(
    request: Request, model: type[Body], *, caller: Caller, version: ApiVersion
) -> ReceivedPrompt[Body]:
    """Read and parse a request with a prompt, within the shares of the caller's organisation.

    Raises what `read_bytes`, `read_body` and `parse_prompt` raise, and Overloaded if too much waits
    to be parsed.
    """
    deps = dependencies_of(request)
    body_bytes: BodyBytes = request.app.state.body_bytes
    customer = caller.organization_id
    with body_bytes.body(customer) as in_flight:
        sent = await read_bytes(request, in_flight)
        arrived_at_ms = deps.now_ms()

        def parse() -> tuple[Body, ParsedPrompt]:
            with uncollected():
                body = read_body(model, sent, version=version)
                blocks = read_blocks(body)
                body = body.without_conversation()
            return body, parse_prompt(body, blocks, catalog=deps.catalog)

        body, prompt = await deps.prompt_threads.run(customer, parse)
    return ReceivedPrompt(body, prompt, arrived_at_ms)
