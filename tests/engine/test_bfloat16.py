"""How far bfloat16 is from float32, in torch and in C, on the default model and short questions."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.kv_cache import KVCache
from engine.loading import load_model
from engine.model_runner import compute_logits
from engine.models.llama import Llama
from tests.engine.rows import row

CPU = torch.device("cpu")
# Measured: 0.050 here, 0.048 over twenty questions; 0.070 when the residual stream was bfloat16.
RMS_MAX = 0.06

CAPITAL = "What is the capital of France?"
QUESTIONS = (
    CAPITAL,
    "What is gravity?",
    "Who wrote Hamlet?",
    "How many legs does a spider have?",
    "What is two plus two?",
    "Name a primary colour.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "What language is spoken in Brazil?",
    "Is the earth flat?",
)


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:
    """Each question as the default model is asked it."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]


def last_logits(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Logits after each prompt, in float32, mean-centred: a shift of all changes no choice."""
    model = load_model(folder, dtype=dtype, device=CPU).model
    logits = torch.cat([_logits(model, prompt) for prompt in prompts]).float()
    return logits - logits.mean(dim=1, keepdim=True)


def _logits(model: Llama, prompt: list[int]) -> torch.Tensor:
    num_blocks = -(-len(prompt) // 16)
    cache = KVCache(
        model.config, num_blocks=num_blocks, block_size=16, dtype=model.dtype, device=CPU
    )
    return compute_logits(model, cache, [row(prompt, start=0, blocks=range(num_blocks))])


@torch.inference_mode()
def test_bfloat16_logits_stay_near_float32(smollm2_folder: Path, prompts: list[list[int]]) -> None:
    exact = last_logits(smollm2_folder, prompts, torch.float32)

    found = last_logits(smollm2_folder, prompts, torch.bfloat16)

    assert (found - exact).square().mean().sqrt() < RMS_MAX
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    answers = [
        tokenizer.decode(logits[QUESTIONS.index(CAPITAL)].argmax()) for logits in (exact, found)
    ]
    assert answers == ["The", "The"]
