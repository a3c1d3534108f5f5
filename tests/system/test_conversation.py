"""A real conversation with SmolLM2 through the official SDKs: answered, cached, billed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sdk.versions import Sdk
from tests.system.conversation import Conversation
from tests.system.installation import Installation

MODEL = "smollm2-135m-instruct"
# In bfloat16 as in float32 its answer begins alike; "the capital of France" is a near tie.
QUESTION = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Installation]:
    """`kvmeter up` as a stranger starts it, with the default model."""
    with Installation(tmp_path_factory.mktemp("served") / "data") as installation:
        yield installation


@pytest.fixture
def smol(served: Installation, sdk: Sdk) -> Conversation:
    return Conversation(sdk, base_url=served.url, api_key=served.keys["api_key"])


def test_the_model_answers_in_english_streamed_and_not(smol: Conversation) -> None:
    body = {"model": MODEL, "max_tokens": 40, "messages": QUESTION}

    whole = smol.call("create", **body)["message"]
    streamed = smol.call("stream", **body)

    assert "Gravity is a fundamental concept in physics" in whole["content"][0]["text"]
    assert "Gravity is a fundamental concept in physics" in streamed["text"]
    assert whole["stop_reason"] == "max_tokens"
    assert streamed["message"]["usage"] == whole["usage"]


def test_a_second_request_reads_the_prefix_at_a_tenth(
    served: Installation, smol: Conversation
) -> None:
    story = f"This is the story of SDK {smol.sdk.version}. " + "The fox went on walking. " * 100
    system = [{"type": "text", "text": story, "cache_control": {"type": "ephemeral"}}]
    body = {"model": MODEL, "max_tokens": 8, "system": system}

    first = smol.call("create", **body, messages=[{"role": "user", "content": "Who walks?"}])
    second = smol.call("create", **body, messages=[{"role": "user", "content": "Where to?"}])

    read = second["message"]["usage"]["cache_read_input_tokens"]
    assert read == first["message"]["usage"]["cache_creation_input_tokens"] > 512
    record = served.record(second["headers"]["request-id"])
    postings = {posting["meter"]: posting for posting in record["postings"]}
    assert postings["cache_read"] == {
        "meter": "cache_read",
        "quantity": str(read),
        "rate_pico": "100000",
        "amount_nanos": str(read * 100),
    }
    assert record["engine"]["tokens_reused_promised"] == read


def test_models_and_counts_through_the_sdk(smol: Conversation) -> None:
    assert [model["id"] for model in smol.call("list_models")["models"]] == [MODEL]
    assert smol.call("retrieve_model", model_id=MODEL)["id"] == MODEL

    counted = smol.call("count_tokens", model=MODEL, messages=QUESTION)["input_tokens"]
    billed = smol.call("create", model=MODEL, max_tokens=1, messages=QUESTION)["message"]["usage"]

    assert counted == billed["input_tokens"]


def test_the_books_are_sound_and_the_gauges_told(served: Installation) -> None:
    with served.client() as client:
        metrics = client.get("/metrics").text

    assert "prefix_tokens_lease_read_total" in metrics
    assert "num_requests_running 0" in metrics
    assert "no problems" in served.run("ledger", "verify")
