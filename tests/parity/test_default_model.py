"""The default model's folder: complete, and found without a network once it is there."""

import json
from pathlib import Path

import pytest

from engine.model_files.default_model import ensure_default_model


def test_the_folder_holds_what_the_gateway_and_the_engine_read(smollm2_folder: Path) -> None:
    def read(name: str) -> dict:
        return json.loads((smollm2_folder / name).read_text(encoding="utf-8"))

    config, generation = read("config.json"), read("generation_config.json")
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 1e5)
    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == 2

    tokenizer = read("tokenizer.json")
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(17))
    assert len(tokenizer["model"]["vocab"]) == 49152
    assert len(tokenizer["model"]["merges"]) == 48900
    assert "<|im_start|>" in read("tokenizer_config.json")["chat_template"]


def test_a_model_that_is_there_is_found_without_fetching(
    smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    assert ensure_default_model(smollm2_folder.parent, lambda line: None) == smollm2_folder
