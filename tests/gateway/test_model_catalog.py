from pathlib import Path

import pytest

from gateway.errors import ModelFolderError, NotFound
from gateway.prompts.model_catalog import Catalog, read_model
from tests.gateway.front import IdleEngine, served
from tests.models import default_model_dir


def test_a_models_facts_come_from_engine_folder_and_settings() -> None:
    info = IdleEngine().info
    assert info is not None

    model = read_model(default_model_dir(), info, min_cache_tokens=512)

    assert (model.id, model.weights_digest) == ("wt", "digest")
    assert model.context_window_tokens == info.max_model_len
    assert model.min_cache_tokens == 512
    assert model.tokenizer.encode("Hello") != []


def test_a_folder_without_its_files_is_refused_by_path(tmp_path: Path) -> None:
    info = IdleEngine().info
    assert info is not None

    with pytest.raises(ModelFolderError, match=r"config\.json: the file cannot be read \(No such"):
        read_model(tmp_path, info, min_cache_tokens=512)


def test_only_served_models_are_found() -> None:
    catalog = Catalog([served("a"), served("b")])

    assert catalog.find("b").id == "b"
    with pytest.raises(NotFound, match=r"^model: c$"):
        catalog.find("c")
