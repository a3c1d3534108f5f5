"""`POST /v1/messages`: from a body to an order, and from a generation to the response.

Between the two, in a task of its own: `requests/generation.py`, with hold, engine and settlement.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.http.auth import Customer, Deps, IgnoreEos, Version
from gateway.http.bodies import read_body, read_bytes
from gateway.http.disconnect import abort_on_disconnect
from gateway.http.event_stream import EventStream
from gateway.prompts.parse import parse_prompt
from gateway.requests.generation import Generation
from gateway.requests.open_requests import OpenRequests
from gateway.requests.order import place_order
from gateway.requests.output import BlockEvent
from gateway.requests.usage import cache_header
from gateway.requests.wire_messages import whole_message
from gateway.wire.request import MessagesRequest

router = APIRouter()


@router.post("/v1/messages", response_model=None)
async def create_message(
    request: Request, caller: Customer, version: Version, ignore_eos: IgnoreEos, deps: Deps
) -> Response:
    """Generate a message, and bill exactly the usage that it states.

    From `start` on the request does not depend on this connection.
    """
    sent = await read_bytes(request)
    started_at_ms = (
        deps.now_ms()
    )  # after the body: a slow one must not read entries that have expired
    body = read_body(MessagesRequest, sent, version=version)
    prompt = await parse_prompt(body, catalog=deps.catalog)
    engine_info = await deps.engine.ready(deps.settings.engine_wait_seconds)
    order = place_order(
        body,
        prompt,
        caller=caller,
        engine_info=engine_info,
        request_id=request.state.request_id,
        message_id=deps.new_id("msg"),
        ignore_eos=ignore_eos,
        started_at_ms=started_at_ms,
    )
    open_requests: OpenRequests = request.app.state.open_requests
    generation = open_requests.start(order)
    async with abort_on_disconnect(generation, request.receive):
        headers = {"x-kvmeter-cache": cache_header(await generation.admitted())}
        if not body.stream:
            events = await _all_events(generation)
            message = whole_message(order, events=events, ending=await generation.ended())
            return JSONResponse(message.model_dump(), headers=headers)
    return EventStream(generation, ping_seconds=deps.settings.ping_seconds, headers=headers)


async def _all_events(generation: Generation) -> list[BlockEvent]:
    events: list[BlockEvent] = []
    while (more := await generation.next_events()) is not None:
        events += more
    return events
