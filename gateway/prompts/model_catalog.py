"""The served models: id, context window, tokenizer, chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.client import EngineInfo
from gateway.errors import ModelFolderError, NotFound
from gateway.prompts.chat_templates import load_chat_template
from gateway.prompts.rendered_prompt import ChatTemplate
from gateway.prompts.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One served model.

    created_at_ms           when its folder was written on this machine
    context_window_tokens   prompt plus output
    min_cache_tokens        shorter breakpoints are inert
    weights_digest          part of every entry key and namespace: other weights, other cache
    """

    id: str
    display_name: str
    created_at_ms: int
    context_window_tokens: int
    min_cache_tokens: int
    weights_digest: str
    chat_template: ChatTemplate
    tokenizer: Tokenizer

    def is_run_by(self, info: EngineInfo) -> bool:
        """Whether this engine runs exactly these weights."""
        return (self.id, self.weights_digest) == (info.model_id, info.weights_digest)


def read_model(model_dir: Path, info: EngineInfo, *, min_cache_tokens: int) -> ServedModel:
    """Return the model that this engine runs, with the tokenizer and chat template of its folder.

    Raises ModelFolderError if the folder is missing a file or asks for what is not supported.
    """
    config = model_dir / "config.json"
    try:
        created_at_ms = config.stat().st_mtime_ns // 1_000_000
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
        raise ModelFolderError(config, problem, cure="fetch the model again") from error
    tokenizer = Tokenizer.load(model_dir)
    return ServedModel(
        id=info.model_id,
        display_name=info.model_id,
        created_at_ms=created_at_ms,
        context_window_tokens=info.max_model_len,
        min_cache_tokens=min_cache_tokens,
        weights_digest=info.weights_digest,
        chat_template=load_chat_template(model_dir, tokenizer),
        tokenizer=tokenizer,
    )


class Catalog:
    """The served models by id, in the order given."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.id: model for model in models}

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All of them, in order."""
        return tuple(self._models.values())

    def find(self, model_id: str) -> ServedModel:
        """Return the model of this id. Raises NotFound with the API's message."""
        if model_id not in self._models:
            raise NotFound(f"model: {model_id}")
        return self._models[model_id]
