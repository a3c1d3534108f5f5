"""`POST /v1/messages/count_tokens`: the prompt's exact length, by the code that will bill it."""

from fastapi import APIRouter, Request

from gateway.http.auth import Customer, Version
from gateway.http.prompt_requests import receive_prompt
from gateway.wire.request import CountTokensRequest
from gateway.wire.response import TokenCount

router = APIRouter()


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, caller: Customer, version: Version) -> TokenCount:
    """Count; free, and nothing is written."""
    received = await receive_prompt(request, CountTokensRequest, caller=caller, version=version)
    return TokenCount(input_tokens=received.prompt.rendered.num_tokens)
