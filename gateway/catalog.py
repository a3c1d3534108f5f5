"""The models served and what is true of each; `GET /v1/models`."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import NotFound
from gateway.prompt import Renderer
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model, as requests need it.

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
    renderer: Renderer
    tokenizer: Tokenizer


class Catalog:
    """The served models by id, in the order given."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.id: model for model in models}

    def find(self, model_id: str) -> ServedModel:
        """The model of this id. Raises NotFound in the API's wording."""
        if model_id not in self._models:
            raise NotFound(f"model: {model_id}")
        return self._models[model_id]
