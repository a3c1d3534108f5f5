"""Error responses: every exception becomes the API's one error body."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from billing.errors import BillingError
from engine.client import EngineLost
from gateway.errors import (
    ERROR_SHAPES,
    GatewayError,
    InvalidRequest,
    error_body,
    error_headers,
    shape_of,
)
from gateway.wire.response import ErrorBody, ErrorDetail

log = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Handle the known errors; the edge handles all others."""
    for kind in (GatewayError, BillingError, EngineLost):
        app.add_exception_handler(kind, _respond)
    app.add_exception_handler(RequestValidationError, _respond_to_parameter)
    app.add_exception_handler(HTTPException, _respond_to_routing)


def error_response(error: BaseException, *, request_id: str) -> JSONResponse:
    """Return the response to this error."""
    return JSONResponse(
        error_body(error, request_id=request_id).model_dump(),
        status_code=shape_of(error).status,
        headers=error_headers(error),
    )


async def _respond(request: Request, error: Exception) -> JSONResponse:
    if shape_of(error).status == 500:
        log.error("request_failed", exc_info=error)
    return error_response(error, request_id=request.state.request_id)


async def _respond_to_parameter(request: Request, error: Exception) -> JSONResponse:
    """A query parameter or path that does not fit its type."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    # The first part of `loc` is where FastAPI looked: "query", "path".
    path = ".".join(str(part) for part in fault["loc"][1:])
    return await _respond(request, InvalidRequest(fault["msg"], path=path))


async def _respond_to_routing(request: Request, error: Exception) -> JSONResponse:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    types = {shape.status: shape.type for shape in ERROR_SHAPES.values()}
    body = ErrorBody(
        error=ErrorDetail(
            type=types.get(error.status_code, "invalid_request_error"),
            message=f"{error.detail}: {request.method} {request.url.path}",
        ),
        request_id=request.state.request_id,
    )
    return JSONResponse(body.model_dump(), status_code=error.status_code, headers=error.headers)
