"""Steps in C for a run under AddressSanitizer and UndefinedBehaviorSanitizer, in their own process.

`python -m tests.engine.sanitized_steps FOLDER COMPILER FORM` ends with status 0 if no step touched
memory that is not its own. `test_native_sanitizers.py` starts it with the sanitizers preloaded.
"""

import random
import sys
from pathlib import Path

import torch

from engine.compute.dtype import read_cpuinfo
from engine.compute.kv_cache import KVCache
from engine.compute.loading import load_model
from engine.compute.native.library import load_library
from tests.engine.rows import row
from tests.engine.tiny_model import write_tiny_model

CPU = torch.device("cpu")
VOCAB_SIZE = 1_000
# Sizes that are no multiples of a gemm tile, and one of each kind of head.
SHAPES = (
    {"head_dim": 32, "hidden_size": 72, "intermediate_size": 104},
    {"head_dim": 96, "hidden_size": 72, "num_attention_heads": 4, "tie_word_embeddings": False},
    {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 1, "attention_bias": True},
)


def main(folder: Path, compiler: str, form: str) -> None:
    library = load_library(folder, cpuinfo=read_cpuinfo(), compiler=compiler, form=form)
    for number, shape in enumerate(SHAPES):
        model_folder = write_tiny_model(folder / str(number), vocab_size=VOCAB_SIZE, **shape)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            run_steps(model_folder, library)


def run_steps(model_folder, library) -> None:
    model = load_model(model_folder, dtype=torch.bfloat16, device=CPU, library=library).backend
    cache = KVCache(model.shape, num_blocks=96, block_size=16, dtype=torch.bfloat16, device=CPU)
    chance = random.Random(0)
    blocks = chance.sample(range(96), 96)

    def tokens(count):
        return [chance.randrange(VOCAB_SIZE) for _ in range(count)]

    def compute(*rows):
        assert model.compute(cache, rows).isfinite().all()

    compute(row(tokens(33 * 16), blocks=blocks))  # a prefix that decodes will share
    for length in (1, 2, 15, 16, 17, 31, 33, 300):  # prompts that end anywhere in a tile
        compute(row(tokens(length), blocks=blocks[40:60]))
        compute(row(tokens(1), start=length, blocks=blocks[40:60]))
        compute(row(tokens(5), start=length + 1, blocks=blocks[40:60], samples=False))
    for readers in (1, 2, 9):
        shared = [
            row(tokens(1), start=33 * 16, blocks=[*blocks[:33], blocks[70 + i]])
            for i in range(readers)
        ]
        compute(*shared, row(tokens(20), blocks=blocks[60:62]), row(tokens(1), blocks=[blocks[62]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
