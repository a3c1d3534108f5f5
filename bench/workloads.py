"""Workloads: lengths from committed lists, words and token ids from seeds.

A list holds the lengths of N requests. Drawn lists are stratified: the N midpoint quantiles of the
distribution, shuffled by the seed, so that even 256 requests have the distribution's tail. W1 to W3
keep the lengths with which the peers were measured.

    python -m bench.workloads      # writes the drawn lists anew
"""

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

FOLDER = Path(__file__).parent / "lists"
FIRST_ID, LAST_ID = 1_000, 40_000  # ordinary tokens: no special one, none outside a vocabulary


@dataclass(frozen=True, slots=True)
class Job:
    """The lengths of one request's prompt and output."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; `max_tokens` is for clients that do not know their length."""

    name: str
    lengths: str
    seed: int
    max_tokens: int
    jobs: tuple[Job, ...]

    def first(self, num_jobs: int, *, shrink: int = 1) -> "Workload":
        """Return the first jobs with lengths divided by `shrink`, for runs without figures."""
        jobs = tuple(
            Job(max(1, job.prompt_tokens // shrink), max(1, job.output_tokens // shrink))
            for job in self.jobs[:num_jobs]
        )
        note = f", first {len(jobs)}, lengths / {shrink}" if shrink > 1 else f", first {len(jobs)}"
        if len(jobs) == len(self.jobs) and shrink == 1:
            note = ""
        return replace(
            self, jobs=jobs, max_tokens=self.max_tokens // shrink, lengths=self.lengths + note
        )

    @property
    def output_tokens(self) -> int:
        """The output tokens of all jobs together."""
        return sum(job.output_tokens for job in self.jobs)

    def prompt(self, number: int, *, salt: str = "") -> bytes:
        """Return a job's prompt as packed token ids; each salt gives another prompt."""
        chance = random.Random(f"{self.name}:{self.seed}:{number}:{salt}")
        return token_ids(chance, self.jobs[number].prompt_tokens)

    def text(self, number: int, *, salt: str = "") -> str:
        """Return a job's prompt as words of one token each."""
        chance = random.Random(f"{self.name}:{self.seed}:{number}:{salt}")
        return words(chance, self.jobs[number].prompt_tokens)


def load(name: str) -> Workload:
    """Read a committed list."""
    plain = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Workload(**plain | {"jobs": tuple(Job(*pair) for pair in plain["jobs"])})


def token_ids(chance: random.Random, num_tokens: int) -> bytes:
    """Return random ordinary tokens, packed as the engine takes them."""
    ids = (chance.randrange(FIRST_ID, LAST_ID) for _ in range(num_tokens))
    return struct.pack(f"<{num_tokens}I", *ids)


def words(chance: random.Random, num_tokens: int) -> str:
    """Return `num_tokens` random words, each one token in SmolLM2's tokenizer."""
    vocabulary = json.loads((FOLDER / "words.json").read_text(encoding="utf-8"))
    return "".join(f" {chance.choice(vocabulary)}" for _ in range(num_tokens))


def draw(name: str) -> Workload:
    """Draw a list from its seed."""
    return DRAWN[name](name)


def _lognormal(*, mean: float, sigma: float, most: int) -> Callable[[float], int]:
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    return lambda share: min(most, max(1, round(math.exp(normal.inv_cdf(share)))))


def _exponential(*, mean: float, most: int) -> Callable[[float], int]:
    return lambda share: min(most, max(1, round(-mean * math.log(1 - share))))


def _uniform(*, least: int, most: int) -> Callable[[float], int]:
    return lambda share: least + math.floor(share * (most - least + 1))


def _stratified(
    quantile: Callable[[float], int], num_jobs: int, chance: random.Random
) -> Sequence[int]:
    lengths = [quantile((i + 0.5) / num_jobs) for i in range(num_jobs)]
    chance.shuffle(lengths)
    return lengths


def _recipe(
    lengths: str,
    *,
    prompt: Callable[[float], int],
    output: Callable[[float], int],
    max_tokens: int,
    num_jobs: int = 256,
    seed: int = 20_261_129,
) -> Callable[[str], Workload]:
    def make(name: str) -> Workload:
        chance = random.Random(f"{name}:{seed}")
        prompts = _stratified(prompt, num_jobs, chance)
        outputs = _stratified(output, num_jobs, chance)
        jobs = tuple(map(Job, prompts, outputs))
        return Workload(name, lengths, seed, max_tokens, jobs)

    return make


DRAWN: dict[str, Callable[[str], Workload]] = {
    "sharegpt": _recipe(
        "ShareGPT-like: lognormal, prompts mean 148, outputs mean 298 (sigma 1.2, at most 2,048)",
        prompt=_lognormal(mean=148, sigma=1.0, most=1_024),
        output=_lognormal(mean=298, sigma=1.2, most=2_048),
        max_tokens=4_096,
    ),
    "exponential": _recipe(
        "exponential-1536: prompts 512, outputs exponential, mean 128, at most 1,536",
        prompt=_uniform(least=512, most=512),
        output=_exponential(mean=128, most=1_536),
        max_tokens=1_536,
    ),
    "uniform": _recipe(
        "uniform: prompts 148, outputs uniform 1 to 512",
        prompt=_uniform(least=148, most=148),
        output=_uniform(least=1, most=512),
        max_tokens=512,
    ),
}


def main() -> None:
    """Write every drawn list to its file."""
    for name in DRAWN:
        plain: dict[str, Any] = asdict(draw(name))
        jobs = [(job["prompt_tokens"], job["output_tokens"]) for job in plain.pop("jobs")]
        head = json.dumps(plain, indent=1)[:-2]
        text = f'{head},\n "jobs": {json.dumps(jobs)}\n}}\n'
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
