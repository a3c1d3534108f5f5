"""`POST /v1/messages/count_tokens`: the prompt's exact length, by the code that will bill it."""

from fastapi import APIRouter, Request

from gateway.http.auth import Customer, Deps, Version
from gateway.http.bodies import read_body, read_bytes
from gateway.prompts.parse import parse_prompt
from gateway.wire.request import CountTokensRequest
from gateway.wire.response import TokenCount

router = APIRouter()


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    request: Request, _caller: Customer, version: Version, deps: Deps
) -> TokenCount:
    """Count; free, and nothing is written."""
    body = read_body(CountTokensRequest, await read_bytes(request), version=version)
    prompt = await parse_prompt(body, catalog=deps.catalog)
    return TokenCount(input_tokens=prompt.rendered.num_tokens)
