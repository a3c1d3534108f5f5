"""The ChatML chat template: each turn between two special tokens, after the name of its role.

    <|im_start|>user\\nWhat is a lease?<|im_end|>\\n<|im_start|>assistant\\n
    └───────── block 1 ─────────────┘└────────────── tail ───────────────┘

The tokens between two blocks belong to the block that follows: the end of the previous turn and the
header of its own. The header is encoded together with the first text of its turn, as in the model's
training data. Later blocks of a turn are encoded alone, so that a block ends at a token boundary.
"""

import re
from collections.abc import Sequence

from gateway.prompts.conversation import Block
from gateway.prompts.rendered_prompt import RenderedPrompt, pack_token_ids
from gateway.prompts.tokenizer import Tokenizer

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class ChatmlTemplate:
    """ChatML; `default_system` is the system turn of a conversation that has none."""

    def __init__(self, tokenizer: Tokenizer, *, default_system: str | None) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.special_id(TURN_START)
        self._turn_break = [tokenizer.special_id(TURN_END), *tokenizer.encode("\n")]
        self._opening = [] if default_system is None else self._turn("system", default_system)
        self._answer = self._turn("assistant", "")

    @classmethod
    def recognize(cls, source: str, tokenizer: Tokenizer) -> "ChatmlTemplate | None":
        """Return the template whose Jinja source this is; None if it is not plain ChatML.

        Raises KeyError if the tokenizer lacks a special token that ChatML needs.
        """
        match = _CHATML.fullmatch(source.strip())
        return None if match is None else cls(tokenizer, default_system=match["default_system"])

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        """Render the conversation; open an assistant turn unless the last turn is one."""
        ids: list[int] = []
        block_ends = []
        role = None
        if self._opening and blocks[0].role != "system":
            ids += self._opening
            role = "system"
        for block in blocks:
            if block.role == role:
                ids += self._tokenizer.encode(block.text)
            else:
                ids += self._turn_break if role is not None else ()
                ids += self._turn(block.role, block.text)
                role = block.role
            block_ends.append(len(ids))
        if role != "assistant":
            ids += [*self._turn_break, *self._answer]
        return RenderedPrompt(pack_token_ids(ids), tuple(block_ends))

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(f"{role}\n{text}")]


# Plain ChatML, with or without a default system turn; a newline may be literal or escaped. A source
# that does more (tools, dropped reasoning, trimmed text) is another template.
_CHATML = re.compile(
    r"""
    \{%\ for\ message\ in\ messages\ %\}
    (?:
        \{%\ if\ loop\.first\ and\ messages\[0\]\['role'\]\ !=\ 'system'\ %\}
        \{\{\ ?'<\|im_start\|>system(?:\n|\\n)
            (?P<default_system>[^'<\\]*)
        <\|im_end\|>(?:\n|\\n)'\ ?\}\}
        \{%\ endif\ %\}
    )?
    \{\{\ ?'<\|im_start\|>'\ \+\ message\['role'\]\ \+\ '(?:\n|\\n)'
        \ \+\ message\['content'\]\ \+\ '<\|im_end\|>'\ \+\ '(?:\n|\\n)'\ ?\}\}
    \{%\ endfor\ %\}
    \{%\ if\ add_generation_prompt\ %\}
    \{\{\ ?'<\|im_start\|>assistant(?:\n|\\n)'\ ?\}\}
    \{%\ endif\ %\}
    """,
    re.VERBOSE,
)
