"""One version of the official SDK in a process of its own: JSON lines in, JSON lines out.

The version is whichever `anthropic` stands first on PYTHONPATH. A job names a call and its
arguments; the answer is {"result": ...}, or {"error": {class, status, type, message, request_id}}.
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import anthropic

Job = dict[str, Any]


def create(client: anthropic.Anthropic, arguments: Job) -> Job:
    raw = client.messages.with_raw_response.create(**arguments)
    message = raw.parse()
    return {"message": message.to_dict(mode="json"), "headers": dict(raw.headers)}


def round_trip(client: anthropic.Anthropic, arguments: Job) -> Job:
    """Ask, then send the SDK's own form of the answer back with one more message, `then`."""
    then = arguments.pop("then")
    first = client.messages.create(**arguments)
    messages = [*arguments.pop("messages"), first.to_param(), then]
    return create(client, {**arguments, "messages": messages})


def stream(client: anthropic.Anthropic, arguments: Job) -> Job:
    """Through the SDK's helper, which assembles the message itself."""
    close_after = arguments.pop("close_after", None)
    text: list[str] = []
    with client.messages.stream(**arguments) as running:
        headers = dict(running.response.headers)
        for piece in running.text_stream:
            text.append(piece)
            if len(text) == close_after:
                return {"text": "".join(text), "headers": headers}
        message = running.get_final_message()
    return {"message": message.to_dict(mode="json"), "text": "".join(text), "headers": headers}


def events(client: anthropic.Anthropic, arguments: Job) -> Job:
    """The stream as it came, event by event."""
    with client.messages.create(stream=True, **arguments) as running:
        headers = dict(running.response.headers)
        return {"events": [event.to_dict(mode="json") for event in running], "headers": headers}


def count_tokens(client: anthropic.Anthropic, arguments: Job) -> Job:
    return client.messages.count_tokens(**arguments).to_dict(mode="json")


def list_models(client: anthropic.Anthropic, arguments: Job) -> Job:
    return {"models": [model.to_dict(mode="json") for model in client.models.list(**arguments)]}


def retrieve_model(client: anthropic.Anthropic, arguments: Job) -> Job:
    return client.models.retrieve(**arguments).to_dict(mode="json")


CALLS: dict[str, Callable[[anthropic.Anthropic, Job], Job]] = {
    call.__name__: call
    for call in (create, round_trip, stream, events, count_tokens, list_models, retrieve_model)
}


def answer(job: Job) -> Job:
    with anthropic.Anthropic(**job["client"]) as client:
        try:
            return {"result": CALLS[job["call"]](client, job["arguments"])}
        except anthropic.APIStatusError as error:
            return {
                "error": {
                    "class": type(error).__name__,
                    "status": error.status_code,
                    "type": getattr(error, "type", None) or _body_type(error.body),
                    "message": error.message,
                    "request_id": error.request_id,
                }
            }
        except anthropic.APIError as error:
            return {"error": {"class": type(error).__name__, "message": error.message}}


def _body_type(body: object) -> str | None:
    """The error type of an SDK too old to have `error.type`."""
    inner = body.get("error") if isinstance(body, dict) else None
    return inner.get("type") if isinstance(inner, dict) else None


def main() -> None:
    warnings.simplefilter("ignore")  # a model id that the SDK calls deprecated is not our business
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
