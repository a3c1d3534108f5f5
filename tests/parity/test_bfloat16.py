"""How far bfloat16 is from float32, in torch and in C, on the default model and short questions."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.loading import load_model
from engine.compute.native.library import Library
from tests.engine.rows import row

CPU = torch.device("cpu")
# Measured: 0.050 here, 0.048 over twenty questions; 0.070 when the residual stream was bfloat16.
RMS_MAX = 0.06
# Measured: 0.028. C rounds less: outputs of linears and the rotation stay in float32.
NATIVE_RMS_MAX = 0.04

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


def last_logits(
    folder: Path, prompts: list[list[int]], dtype: torch.dtype, library: Library | None = None
) -> torch.Tensor:
    """Logits after each prompt, in float32, mean-centred: a shift of all changes no choice."""
    model = load_model(folder, dtype=dtype, device=CPU, library=library).backend
    logits = torch.cat([_logits(model, prompt) for prompt in prompts]).float()
    return logits - logits.mean(dim=1, keepdim=True)


def _logits(model: Backend, prompt: list[int]) -> torch.Tensor:
    num_blocks = -(-len(prompt) // 16)
    cache = KVCache(
        model.shape, num_blocks=num_blocks, block_size=16, dtype=model.dtype, device=CPU
    )
    return model.compute(cache, [row(prompt, start=0, blocks=range(num_blocks))]).clone()


@pytest.fixture(scope="module")
def exact(smollm2_folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """The questions' logits in float32."""
    return last_logits(smollm2_folder, prompts, torch.float32)


def rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@torch.inference_mode()
def test_bfloat16_logits_stay_near_float32(
    smollm2_folder: Path, prompts: list[list[int]], exact: torch.Tensor
) -> None:
    found = last_logits(smollm2_folder, prompts, torch.bfloat16)

    assert rms(found, exact) < RMS_MAX
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    answers = [
        tokenizer.decode(logits[QUESTIONS.index(CAPITAL)].argmax()) for logits in (exact, found)
    ]
    assert answers == ["The", "The"]


@pytest.mark.parametrize("form", ["native", "portable"])
def test_logits_computed_in_c_are_nearer(
    form: str,
    kernels: dict[str, Library],
    smollm2_folder: Path,
    prompts: list[list[int]],
    exact: torch.Tensor,
) -> None:
    found = last_logits(smollm2_folder, prompts, torch.bfloat16, kernels[form])

    assert rms(found, exact) < NATIVE_RMS_MAX


@pytest.mark.parametrize("form", ["native", "portable"])
def test_c_and_torch_choose_the_same_tokens(
    form: str, kernels: dict[str, Library], smollm2_folder: Path, prompts: list[list[int]]
) -> None:
    prompt = prompts[QUESTIONS.index(CAPITAL)]
    in_c = load_model(smollm2_folder, dtype=torch.bfloat16, device=CPU, library=kernels[form])
    in_torch = load_model(smollm2_folder, dtype=torch.float32, device=CPU)

    assert greedy(in_c.backend, prompt, 12) == greedy(in_torch.backend, prompt, 12)


def greedy(model: Backend, prompt: list[int], count: int) -> list[int]:
    """The prompt in one step, then a token a step."""
    cache = KVCache(model.shape, num_blocks=8, block_size=16, dtype=model.dtype, device=CPU)
    tokens = list(prompt)
    for start in [0, *range(len(prompt), len(prompt) + count - 1)]:
        step = row(tokens[start:], start=start, blocks=range(8))
        tokens.append(int(model.compute(cache, [step]).argmax()))
    return tokens[len(prompt) :]
