"""Authentication and request headers: API key, workspace, API version, x-kvmeter-ignore-eos."""

from typing import Annotated, cast

from fastapi import Depends, Request

from billing.customers import Caller, find_caller
from gateway.dependencies import Dependencies
from gateway.errors import AuthenticationFailed, InvalidRequest, PermissionRefused
from gateway.wire.request import ApiVersion

API_VERSIONS: tuple[ApiVersion, ...] = ("2023-06-01", "2026-10-21")


def dependencies_of(request: Request) -> Dependencies:
    """The dependencies that this application was composed of."""
    return cast("Dependencies", request.app.state.deps)


async def any_caller(request: Request) -> Caller:
    """Return the caller behind a valid key.

    Raises AuthenticationFailed, or PermissionRefused if the request names another workspace.
    """
    secret, name = _credential(request)
    caller = await dependencies_of(request).database.read(lambda conn: find_caller(conn, secret))
    if caller is None:
        raise AuthenticationFailed(f"invalid {name}")
    request.state.caller = caller
    named = request.headers.get("anthropic-workspace-id")
    if named is not None and named != caller.workspace_id:
        raise PermissionRefused(f"This API key does not belong to the workspace: {named}")
    return caller


async def customer(caller: Annotated[Caller, Depends(any_caller)]) -> Caller:
    """Return a caller who may spend money. Raises PermissionRefused for an admin key."""
    if caller.kind != "customer":
        raise PermissionRefused("An admin key cannot be used here: use a customer's API key")
    return caller


async def api_version(request: Request) -> ApiVersion:
    """Return the API version that the client was written for; the header is required."""
    sent = request.headers.get("anthropic-version")
    if sent is None:
        raise InvalidRequest("header is required", path="anthropic-version")
    for version in API_VERSIONS:
        if sent == version:
            return version
    raise InvalidRequest(
        f"{sent} is not one of {', '.join(API_VERSIONS)}", path="anthropic-version"
    )


async def ignore_eos(request: Request) -> bool:
    """Return whether the output is to be exactly `max_tokens` long; for load tests."""
    sent = request.headers.get("x-kvmeter-ignore-eos", "0")
    if sent not in ("0", "1"):
        raise InvalidRequest(f"{sent} is not one of 0, 1", path="x-kvmeter-ignore-eos")
    return sent == "1"


AnyCaller = Annotated[Caller, Depends(any_caller)]
Customer = Annotated[Caller, Depends(customer)]
Version = Annotated[ApiVersion, Depends(api_version)]
IgnoreEos = Annotated[bool, Depends(ignore_eos)]
Deps = Annotated[Dependencies, Depends(dependencies_of)]


def _credential(request: Request) -> tuple[str, str]:
    """Return the secret and the name to use in errors; `x-api-key` wins over a bearer token."""
    key = request.headers.get("x-api-key")
    if key is not None:
        return key, "x-api-key"
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), "bearer token"
    raise AuthenticationFailed("x-api-key or authorization header is required")
