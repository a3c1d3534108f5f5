"""All errors of the gateway, and the table from exception class to HTTP status and error type.

GatewayError
├── InvalidRequest            400  the body, a header or a parameter is wrong
├── AuthenticationFailed      401  no credential, or one we do not know
├── PermissionRefused         403  a known credential that may not do this
├── NotFound                  404
├── RequestTimeout            408  the body did not arrive in time
├── RequestTooLarge           413
├── EngineFailed              500  the engine gave up on an admitted request
├── NotReady                  503  something the gateway needs is missing; /readyz only
├── Overloaded                529  the engine's queue is full, or the wait in it too long
│   ├── EngineReplaced             the engine runs other weights than this gateway sells
│   ├── LedgerUnavailable          the database did not take a write
│   └── TooManyWaiting             too many requests of this process wait for cache entries
├── ResponseBrokenOff              never sent: makes the server close a connection
└── OperatorError                  never sent: one sentence for the operator, exit code 1
    ├── CannotListen               the address to serve on cannot be had
    ├── CommandError               a command cannot do what was asked
    ├── ModelFolderError           a model folder that cannot be served
    └── ServerSecretError          the file of the server secret is damaged

The other packages' errors know nothing of HTTP; ERROR_SHAPES has their shapes too. A class without
an entry takes its nearest ancestor's. What is not in the table is our fault: a 500 without details.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from billing.errors import (
    BillingError,
    HoldNotOwned,
    InsufficientBalance,
    OwnerEnded,
    UnknownPrice,
    WriterUnavailable,
)
from engine.client import EngineLost, Rejected
from gateway.wire.response import ErrorBody, ErrorDetail


class GatewayError(Exception):
    """A request that cannot be served, with a message meant for the client.

    `headers` go into the error response, such as `retry-after`; a stream that has begun drops them.
    """

    def __init__(
        self,
        message: str,
        *,
        error_code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.error_code = error_code
        self.headers = dict(headers or {})


class InvalidRequest(GatewayError):
    """The request is wrong; `path` says where, in dotted form."""

    def __init__(
        self, message: str, *, path: str | None = None, error_code: str | None = None
    ) -> None:
        super().__init__(f"{path}: {message}" if path else message, error_code=error_code)


class AuthenticationFailed(GatewayError):
    """No credential, or one that is unknown or revoked."""


class PermissionRefused(GatewayError):
    """The credential is good, but not for this."""


class NotFound(GatewayError):
    """No such route, model or record."""


class RequestTimeout(GatewayError):
    """The client took too long to send its request."""


class RequestTooLarge(GatewayError):
    """The body is longer than the route takes."""


class EngineFailed(GatewayError):
    """The engine gave up on a request that it had admitted."""


class NotReady(GatewayError):
    """Requests would not be served now."""


class Overloaded(GatewayError):
    """The engine cannot take one more request now."""


class EngineReplaced(Overloaded):
    """The engine runs other weights than the ones this gateway sells."""


class LedgerUnavailable(Overloaded):
    """The database did not take a write in time."""


class TooManyWaiting(Overloaded):
    """Too many requests of this process wait for cache entries already."""


class ResponseBrokenOff(GatewayError):
    """A response failed after its start; tells the server to close the connection."""


class OperatorError(GatewayError):
    """A command or a start cannot go on; the message is one sentence for the operator."""


class CannotListen(OperatorError):
    """The address to serve on cannot be had."""


class CommandError(OperatorError):
    """A command cannot do what was asked."""


class ServerSecretError(OperatorError):
    """The file of the server secret does not hold one."""


class ModelFolderError(OperatorError):
    """A file of a model folder is missing, damaged, or asks for what is not supported."""

    def __init__(self, path: Path, problem: str, *, cure: str) -> None:
        super().__init__(f"{path}: {problem}: {cure}")


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Status, type and message of an exception class on the wire; None: the exception's message."""

    status: int
    type: str
    message: str | None = None


INTERNAL = ErrorShape(500, "api_error", "Internal server error")

RESTARTED = ErrorShape(529, "overloaded_error", "The server was restarted; try again")

ERROR_SHAPES: dict[type[Exception], ErrorShape] = {
    InvalidRequest: ErrorShape(400, "invalid_request_error"),
    AuthenticationFailed: ErrorShape(401, "authentication_error"),
    PermissionRefused: ErrorShape(403, "permission_error"),
    NotFound: ErrorShape(404, "not_found_error"),
    RequestTimeout: ErrorShape(408, "timeout_error"),
    RequestTooLarge: ErrorShape(413, "request_too_large"),
    EngineFailed: ErrorShape(500, "api_error"),
    NotReady: ErrorShape(503, "api_error"),
    Overloaded: ErrorShape(529, "overloaded_error"),
    OperatorError: INTERNAL,
    ResponseBrokenOff: INTERNAL,
    InsufficientBalance: ErrorShape(
        402, "billing_error", "The credit balance is too low for this request"
    ),
    UnknownPrice: ErrorShape(
        400, "invalid_request_error", "This model cannot be used: it has no price here"
    ),
    WriterUnavailable: ErrorShape(
        529, "overloaded_error", "The ledger has no room for one more request"
    ),
    OwnerEnded: RESTARTED,
    HoldNotOwned: RESTARTED,
    BillingError: INTERNAL,
    EngineLost: ErrorShape(529, "overloaded_error", "The engine is not reachable now; try again"),
}


def shape_of(error: BaseException) -> ErrorShape:
    """The shape of the exception's nearest ancestor in the table, or INTERNAL."""
    return next(
        (ERROR_SHAPES[kind] for kind in type(error).__mro__ if kind in ERROR_SHAPES), INTERNAL
    )


def error_body(error: BaseException, *, request_id: str) -> ErrorBody:
    """The body of this error; also the data of a stream's `event: error`."""
    shape = shape_of(error)
    error_code = getattr(error, "error_code", None)
    return ErrorBody(
        error=ErrorDetail(
            type=shape.type,
            message=str(error) if shape.message is None else shape.message,
            details=None if error_code is None else {"error_code": error_code},
        ),
        request_id=request_id,
    )


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the headers that an error response carries."""
    return error.headers if isinstance(error, GatewayError) else {}


def rejection(rejected: Rejected) -> GatewayError:
    """The engine's refusal to admit a request, as an error of the gateway."""
    if rejected.code == "overloaded":
        return Overloaded(rejected.message)
    return InvalidRequest(rejected.message)
