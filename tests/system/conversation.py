"""One SDK version talking to the word stack."""

from typing import Any

from tests.gateway.stack import MODEL, complete
from tests.gateway.talk import Split, split_of_usage
from tests.sdk.versions import Sdk

AUTOMATIC = {"type": "ephemeral"}


class Conversation:
    """Calls with one SDK version and one key."""

    def __init__(self, sdk: Sdk, *, base_url: str, api_key: str) -> None:
        self.sdk = sdk
        self.base_url = base_url
        self.api_key = api_key

    def with_key(self, api_key: str) -> "Conversation":
        """The same SDK with another key."""
        return Conversation(self.sdk, base_url=self.base_url, api_key=api_key)

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self.sdk.call(call, base_url=self.base_url, api_key=self.api_key, **arguments)

    def create(self, **body: Any) -> dict[str, Any]:
        """One answer, at most five words long unless `body` says otherwise."""
        return self.call("create", **complete(body))

    def split(self, **body: Any) -> Split:
        """How the prompt of one request was billed."""
        return split_of_usage(self.create(**body)["message"]["usage"])

    def count(self, **body: Any) -> int:
        counted = {key: body[key] for key in body.keys() - {"max_tokens"}}
        tokens: int = self.call("count_tokens", model=MODEL, **counted)["input_tokens"]
        return tokens
