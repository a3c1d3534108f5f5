"""The cost of a step without the model: scheduler, bookkeeping, journal (full: about 20 s).

The real core and journal run on one thread with a runner that returns at once. First 64 sequences
decode; then each one that ends is replaced.
"""

import random
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter

from bench.engines import request
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.timing import percentile
from bench.workloads import token_ids
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.journal.journal import Journal
from engine.plan import Plan
from engine.protocol import Finished

BATCH, PROMPT_TOKENS = 64, 256
MOST_MS = 1.0


class InstantRunner:
    """A runner that samples the same token for every row, without a model."""

    num_rows = 0  # rows of the last step

    def execute(self, plan: Plan) -> list[int]:
        """Return one token for each row that samples."""
        self.num_rows = len(plan.rows)
        return [7 for row in plan.rows if row.samples]


async def body(options: Options) -> ExhibitResult:
    """Time steady decoding, then turnover: a new request for each that ends."""
    num_steps = 200 if options.quick else 5_000
    result = ExhibitResult(
        f"A step without the model, batch {BATCH}",
        [f"fixed: {BATCH} x {PROMPT_TOKENS} in; turnover: outputs uniform 16 to 64"],
        ("load", "p50 ms", "p99 ms", "max ms", "at most (p50)"),
    )
    for load, outputs in (("decoding", (num_steps + 8,) * 2), ("turnover", (16, 64))):
        times = measure(num_steps, *outputs)
        result.rows.append(
            (load, percentile(times, 50), percentile(times, 99), max(times), f"{MOST_MS} ms")
        )
        result.figures[load] = times
    lines: dict[str, list[tuple[float | str, float]]] = {
        load: [(percent, percentile(times, percent)) for percent in range(101)]
        for load, times in result.figures.items()
    }
    result.plot = Plot("lines", "percentile", "ms a step", lines)
    return result


def measure(num_steps: int, least: int, most: int) -> list[float]:
    """Return the milliseconds of each step with a full batch."""
    chance = random.Random("step time")
    config = EngineConfig(
        num_blocks=65_536, max_model_len=8_192, vocab_size=49_152, pin_cap_blocks=49_152,
        namespace_quota_blocks=49_152,
    )  # fmt: skip
    times: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Journal(Path(folder, "journal"))) as journal,
    ):
        runner = InstantRunner()
        core = EngineCore(config, runner, boot_id="eng_bench", journal=journal)
        missing = BATCH
        while len(times) < num_steps:
            for _ in range(missing):
                prompt = token_ids(chance, PROMPT_TOKENS)
                refused = core.submit(request(prompt, chance.randint(least, most)), 0)
                if refused is not None:
                    raise BenchError(refused.message)
            start_s = perf_counter()
            events = core.step(0)
            journal.flush()
            spent_ms = (perf_counter() - start_s) * 1000
            if runner.num_rows == BATCH:
                times.append(spent_ms)
            missing = sum(isinstance(event, Finished) for event in events)
    return times


if __name__ == "__main__":
    present(__doc__, body)
