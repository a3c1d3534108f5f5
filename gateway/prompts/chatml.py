"""ChatML: each turn between two special tokens, under the name of its role.

    <|im_start|>user\\nWhat is a lease?<|im_end|>\\n<|im_start|>assistant\\n
    └───────── block 1 ─────────────┘└────────────── tail ───────────────┘

The tokens between two blocks belong to the one that follows: the end of the turn before it and the
header of its own. The header is encoded together with the first text of its turn, as the model saw
it in training; later blocks of a turn are encoded alone, so that a block's end is always a token's.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from gateway.errors import ModelFolderError
from gateway.prompts.conversation import Block
from gateway.prompts.rendered_prompt import RenderedPrompt, pack_tokens
from gateway.prompts.tokenizer import Tokenizer

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class ChatmlRenderer:
    """Renders ChatML; `default_system` is the system turn of a conversation that brings none."""

    def __init__(self, tokenizer: Tokenizer, *, default_system: str | None) -> None:
        self._tokenizer = tokenizer
        self._start = tokenizer.special_id(TURN_START)
        self._turn_break = [tokenizer.special_id(TURN_END), *tokenizer.encode("\n")]
        self._opening = [] if default_system is None else self._turn("system", default_system)
        self._answer = self._turn("assistant", "")

    @classmethod
    def load(cls, model_dir: Path, tokenizer: Tokenizer) -> "ChatmlRenderer":
        """The renderer of a model folder. Raises ModelFolderError if its template is another."""
        path, template = _read_template(model_dir)
        match = _CHATML.fullmatch(template.strip())
        if match is None:
            problem = "the chat template is not plain ChatML, the only one served yet"
            raise ModelFolderError(path, problem, cure="choose another model")
        try:
            return cls(tokenizer, default_system=match["default_system"])
        except KeyError as error:
            problem = f"the template needs a special token that the tokenizer lacks: {error}"
            raise ModelFolderError(path, problem, cure="fetch the model again") from error

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        """Render the conversation, and open the answer unless its last turn is one begun."""
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
        return RenderedPrompt(pack_tokens(ids), tuple(block_ends))

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(f"{role}\n{text}")]


def _read_template(model_dir: Path) -> tuple[Path, str]:
    """The folder's chat template: a file of its own, or a field of tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    try:
        if path.exists():
            return path, path.read_text(encoding="utf-8")
        path = model_dir / "tokenizer_config.json"
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError) as error:
        problem = f"the chat template cannot be read ({error})"
        raise ModelFolderError(path, problem, cure="fetch the model again") from error
    if not isinstance(template, str):
        problem = "the model has no chat template"
        raise ModelFolderError(path, problem, cure="choose an instruction-tuned model")
    return path, template


# The one template we can render without a template engine, with or without a default system turn.
# A newline in it may be written out or escaped. Whatever else a template does (tools, dropped
# reasoning, trimmed text) makes it another one.
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
