"""What is refused before it costs anything."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.errors import InvalidRequest
from gateway.prompts.conversation import Block, read_blocks
from gateway.prompts.model_catalog import Catalog
from gateway.prompts.parse import PIECE_CHARACTERS, parse_prompt
from gateway.prompts.rendered_prompt import RenderedPrompt
from tests.gateway.bodies import read, text, turn
from tests.gateway.front import served
from tests.gateway.word_template import WordTokenizer


class NeverRenders:
    """A chat template that must not be reached."""

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        raise AssertionError(f"{len(blocks)} blocks were rendered")


def test_blocks_that_cannot_fit_are_counted_and_never_tokenised() -> None:
    model = replace(served(), chat_template=NeverRenders(), context_window_tokens=99)
    request = read(model=model.id, messages=[turn("user", *[text("x")] * 100)])

    with pytest.raises(InvalidRequest, match="prompt is too long: 100 tokens > 99 maximum"):
        parse_prompt(request, read_blocks(request), catalog=Catalog([model]))


class CountingTokenizer(WordTokenizer):
    """A tokenizer with a token for each character, that counts what it is given."""

    num_characters = 0

    def encode(self, text: str) -> list[int]:
        self.num_characters += len(text)
        return [1] * len(text)


def test_a_text_of_far_too_many_tokens_is_tokenised_only_so_far() -> None:
    tokenizer = CountingTokenizer()
    model = replace(
        served(),
        chat_template=NeverRenders(),
        tokenizer=tokenizer,  # type: ignore[arg-type]
        context_window_tokens=20_000,
    )
    request = read(model=model.id, messages=[turn("user", text("7" * 1_000_000))])

    with pytest.raises(InvalidRequest, match="prompt is too long"):
        parse_prompt(request, read_blocks(request), catalog=Catalog([model]))

    assert tokenizer.num_characters <= 2 * 20_000 + PIECE_CHARACTERS
