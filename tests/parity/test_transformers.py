"""The same numbers as transformers, in float32: on SmolLM2 and on a stretched rotary embedding."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from engine.compute.backend import Backend
from engine.compute.kv_cache import KVCache
from engine.compute.loading import load_model
from tests.engine.rows import row
from tests.engine.tiny_model import write_tiny_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4
SENTENCE = "Prompt caching keeps the keys and values of a prefix, and 12,345 tokens cost little. "


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> Backend:
    return load_model(smollm2_folder, dtype=torch.float32, device=CPU).backend


@torch.inference_mode()
def paged_logits(model: Backend, tokens: list[int], chunk_tokens: int) -> torch.Tensor:
    """Logits at the end of every chunk, through a scattered block table."""
    num_blocks = -(-len(tokens) // 16)
    cache = KVCache(
        model.shape, num_blocks=2 * num_blocks, block_size=16, dtype=model.dtype, device=CPU
    )
    blocks = range(2 * num_blocks - 1, -1, -2)
    ends = []
    for start in range(0, len(tokens), chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        ends.append(model.compute(cache, [row(chunk, start=start, blocks=blocks)]))
    return torch.cat(ends)


@torch.inference_mode()
def reference_logits(
    reference: LlamaForCausalLM, tokens: list[int], chunk_tokens: int
) -> torch.Tensor:
    """The reference's logits at the same positions, computed in one piece."""
    ends = [
        min(end, len(tokens))
        for end in range(chunk_tokens, len(tokens) + chunk_tokens, chunk_tokens)
    ]
    logits = reference(torch.tensor([tokens])).logits[0]
    return logits[[end - 1 for end in ends]]


@pytest.mark.parametrize(
    ("text", "chunk_tokens"),
    [
        ("The capital of France is", 64),
        ("def fibonacci(n):\n    if n < 2:\n        return n\n", 1),
        (SENTENCE * 14, 100),
        (SENTENCE * 14, 333),
    ],
    ids=["short", "token by token", "long in chunks", "long in one"],
)
def test_smollm2_logits_agree_within_a_ten_thousandth(
    text: str,
    chunk_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    reference: LlamaForCausalLM,
    model: Backend,
) -> None:
    tokens = tokenizer(text)["input_ids"]

    found = paged_logits(model, tokens, chunk_tokens)

    expected = reference_logits(reference, tokens, chunk_tokens)
    assert (found - expected).abs().max() < TOLERANCE


def test_smollm2_answers_in_english(
    tokenizer: PreTrainedTokenizerBase, reference: LlamaForCausalLM
) -> None:
    question = [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    answer = reference.generate(**prompt, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]

    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert tokenizer.tokenize("in 2026<|im_end|>\n") == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "6",
        "<|im_end|>",
        "Ċ",
    ]


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_llama3_rotary_scaling_agrees(tmp_path: Path, place: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    if place == "rope_parameters":
        scaling["rope_theta"] = 10000.0
    folder = write_tiny_model(tmp_path / "model", vocab_size=512, **{place: scaling})
    tokens = torch.randint(512, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    model = load_model(folder, dtype=torch.float32, device=CPU).backend

    found = paged_logits(model, tokens, 70)

    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (found - reference_logits(reference, tokens, 70)).abs().max() < TOLERANCE
