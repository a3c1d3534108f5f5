"""Twice as many leases as the cap allows, under load: nobody hangs, and a refusal says so."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stack import Stack, running_stack, word_config
from tests.gateway.talk import Split, split_of, text, user

BLOCK = 16
CAP_BLOCKS = 64
PREFIX_BLOCKS = 4  # so the cap allows 16 prefixes
NUM_PREFIXES = 2 * CAP_BLOCKS // PREFIX_BLOCKS


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    config = word_config(
        num_blocks=CAP_BLOCKS + 32,
        max_model_len=32 * BLOCK,
        pin_cap_blocks=CAP_BLOCKS,
        namespace_quota_blocks=CAP_BLOCKS,
        max_num_seqs=8,
    )
    with running_stack(tmp_path, config=config, settings={"cache_min_tokens": 32}) as stack:
        yield stack


def test_refused_leases_are_plain_input_and_say_so(stack: Stack) -> None:
    bodies = [
        {
            "system": [text(PREFIX_BLOCKS * BLOCK, f"book{number}.", ttl="5m")],
            "messages": [user(text(10, f"ask{number}."))],
        }
        for number in range(NUM_PREFIXES)
    ]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(stack.post, bodies))

    tokens = PREFIX_BLOCKS * BLOCK
    granted = [answer for answer in answers if split_of(answer) == Split(w5=tokens, input=10)]
    refused = [answer for answer in answers if split_of(answer) == Split(input=tokens + 10)]
    assert len(granted) == NUM_PREFIXES // 2
    assert len(refused) == NUM_PREFIXES // 2
    for answer in refused:
        assert f"@{tokens}" in answer.headers["x-kvmeter-cache"].split("refused=")[1]
        (grant,) = stack.record(answer.headers["request-id"])["engine"]["grants"]
        assert grant["outcome"] == "refused"
    for body, answer in zip(bodies, answers, strict=True):
        again = split_of(stack.post(body))
        assert again.read == (tokens if answer in granted else 0)
