"""W1 (short chat requests) on transformers: one at a time, and in padded batches.

Weights, dtype, token ids and output lengths are the same; rounds are interleaved. *One at a time*
is one generate() call a request, for the first 24. *Padded batches* are generate() calls of 8
requests in order of arrival, each run to its longest output. Only requested tokens count.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench.engines import Engine, ask_all, request, warm_up
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.workloads import Workload, load

ALONE_JOBS, BATCH = 24, 8
AT_LEAST = {"one at a time": 10, "padded batches of 8": 5}


async def body(options: Options) -> ExhibitResult:
    """Run every arm once a round."""
    workload, rounds = load("w1"), 3
    if options.quick:
        workload, rounds = workload.first(3, shrink=16), 1
    arms: dict[str, list[float]] = {"one at a time": [], "padded batches of 8": [], "kvmeter": []}
    async with Engine(options.model, "--no-enable-prefix-caching") as engine:
        generate = load_transformers(options, engine.info.dtype)
        await warm_up(engine)
        generate([workload.prompt(0)], 2)
        for number in range(rounds):
            arms["one at a time"].append(alone(generate, workload, str(number)))
            arms["padded batches of 8"].append(padded(generate, workload, str(number)))
            arms["kvmeter"].append(await ours(engine, workload, str(number)))
    result = ExhibitResult(
        "Output tokens/s on W1 against transformers",
        [workload.lengths],
        ("arm", "tok/s", "rounds", "kvmeter is faster by", "at least"),
    )
    for arm, speeds in arms.items():
        least = AT_LEAST.get(arm)
        result.rows.append((
            arm, median(speeds), " ".join(f"{speed:.1f}" for speed in speeds),
            median(arms["kvmeter"]) / median(speeds) if least else None, least,
        ))  # fmt: skip
    result.figures = arms
    points: list[tuple[float | str, float]] = [(arm, median(s)) for arm, s in arms.items()]
    result.plot = Plot("bars", "", "output tokens/s", {"W1": points})
    return result


Generate = Callable[[list[bytes], int], int]


def load_transformers(options: Options, dtype: str) -> Generate:
    """Return a function that generates `num_tokens` for each prompt and returns the total."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype))
    model.eval()

    def generate(prompts: list[bytes], num_tokens: int) -> int:
        rows = [list(memoryview(prompt).cast("I")) for prompt in prompts]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return int(out[:, longest:].numel())

    return generate


def alone(generate: Generate, workload: Workload, salt: str) -> float:
    """Return output tokens a second with one call a request."""
    jobs = list(enumerate(workload.jobs[:ALONE_JOBS]))
    wanted = sum(job.output_tokens for _, job in jobs)
    start_s = perf_counter()
    produced = sum(generate([workload.prompt(i, salt=salt)], job.output_tokens) for i, job in jobs)
    if produced != wanted:
        raise BenchError(f"transformers produced {produced} tokens of {wanted}")
    return wanted / (perf_counter() - start_s)


def padded(generate: Generate, workload: Workload, salt: str) -> float:
    """Return output tokens a second with one call a batch, run to its longest output."""
    start_s = perf_counter()
    for first in range(0, len(workload.jobs), BATCH):
        jobs = workload.jobs[first : first + BATCH]
        prompts = [workload.prompt(first + i, salt=salt) for i in range(len(jobs))]
        generate(prompts, max(job.output_tokens for job in jobs))
    return workload.output_tokens / (perf_counter() - start_s)


async def ours(engine: Engine, workload: Workload, salt: str) -> float:
    """Return output tokens a second of our engine, with all requests sent at once."""
    start_s = perf_counter()
    replies = await ask_all(
        engine,
        (
            request(workload.prompt(i, salt=salt), job.output_tokens)
            for i, job in enumerate(workload.jobs)
        ),
    )
    return sum(r.served_record.output_tokens for r in replies) / (perf_counter() - start_s)


if __name__ == "__main__":
    present(__doc__, body)
