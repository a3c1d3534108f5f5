"""The chat template of a model folder, chosen among the known families."""

import json
from collections.abc import Callable
from pathlib import Path

from gateway.errors import ModelFolderError
from gateway.prompts.chatml import ChatmlTemplate
from gateway.prompts.rendered_prompt import ChatTemplate
from gateway.prompts.tokenizer import Tokenizer

# Each returns its template for a Jinja source that it recognises, else None. A new family is a file
# beside chatml.py and a name here.
FAMILIES: tuple[Callable[[str, Tokenizer], ChatTemplate | None], ...] = (ChatmlTemplate.recognize,)


def load_chat_template(model_dir: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a model folder.

    Raises ModelFolderError if the folder has none, or one of an unknown family.
    """
    path, source = _read_source(model_dir)
    try:
        known = (template for family in FAMILIES if (template := family(source, tokenizer)))
        template = next(known, None)
    except KeyError as error:
        problem = f"the template needs a special token that the tokenizer lacks: {error}"
        raise ModelFolderError(path, problem, cure="fetch the model again") from error
    if template is None:
        problem = "the chat template is not plain ChatML, the only one served yet"
        raise ModelFolderError(path, problem, cure="choose another model")
    return template


def _read_source(model_dir: Path) -> tuple[Path, str]:
    """Return the Jinja source: a file of its own, or a field of tokenizer_config.json."""
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
