"""The engine's command line; for most flags an environment variable gives the default."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from engine.config import KVLayout, Scheduling
from engine.errors import AddressError
from engine.link.address import parse_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parsed command line of one engine process; `--help` explains each value."""

    model: Path
    model_id: str
    data_dir: Path
    listen: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    step_target_ms: int
    max_queue_wait_seconds: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling: Scheduling
    kv_layout: KVLayout
    block_size: int
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    num_threads: int | None
    lease_cap_bytes: int | None
    lease_quota_bytes: int | None
    lease_host_bytes: int
    lease_disk_bytes: int
    dtype: Literal["auto", "float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    native_kernels: bool
    tensor_parallel_size: Literal[1]
    until_stdin_closes: bool


def parse_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """Parse the command line; on bad input print one sentence and exit with code 2."""
    parser = _parser(environment)
    chosen = vars(parser.parse_args(arguments))
    data_dir: Path = chosen["data_dir"]
    chosen["listen"] = chosen["listen"] or f"unix:{data_dir / 'run' / 'engine.sock'}"
    chosen["model_id"] = chosen["model_id"] or chosen["model"].resolve().name
    return Arguments(**chosen)


class _Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:  # type: ignore[explicit-override] # Python 3.12
        """Print the error and exit."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvmeter engine",
        description="Serve one model: token ids in, token ids out, over a socket.",
        epilog="A variable in brackets gives the default of its flag.",
        allow_abbrev=False,
    )

    def add(flag: str, text: str, *, variable: str | None = None, **options: Any) -> None:
        # A default from the environment is a string, so argparse checks it like a typed value.
        if variable is not None:
            text += f" [{variable}]"
            stated = environment.get(variable) or options.get("default")
            if options.get("action") is argparse.BooleanOptionalAction:
                stated = _switch(parser, variable, stated)  # argparse does not check this default
            options["default"] = stated
        if options.get("required") and options.get("default") is not None:
            options["required"] = False
        parser.add_argument(flag, help=text, **options)

    _add_places(add)
    _add_limits(add)
    _add_comparisons(add)
    _add_machine(add)
    _add_leases(add)
    return parser


def _add_places(add: Any) -> None:
    add(
        "--model",
        "The model's folder, as on the Hugging Face hub.",
        variable="KVMETER_MODEL",
        type=_folder,
        metavar="DIR",
        required=True,
    )
    add("--model-id", "The name clients ask for; the folder's name if absent.", metavar="ID")
    add(
        "--data-dir",
        "Where the journal, the leases and the pid file go.",
        variable="DATA_DIR",
        type=Path,
        metavar="DIR",
        default="var",
    )
    add(
        "--listen",
        "unix:PATH or tcp://HOST:PORT; a socket in the data folder if absent. TCP has no "
        "password: keep it on a private network.",
        variable="KVMETER_ENGINE_URL",
        type=_address,
        metavar="URL",
    )
    add(
        "--until-stdin-closes",
        argparse.SUPPRESS,  # how `kvmeter up` ends its engine, also when it is killed itself
        action="store_true",
    )


def _add_limits(add: Any) -> None:
    add(
        "--max-model-len",
        "Longest prompt plus output in tokens; if absent what the model allows.",
        variable="KVMETER_MAX_MODEL_LEN",
        type=_count,
        metavar="N",
    )
    add(
        "--max-num-seqs",
        "Sequences that run at once; 1 serves one request at a time.",
        variable="KVMETER_MAX_NUM_SEQS",
        type=_count,
        metavar="N",
        default="64",
    )
    add(
        "--max-num-batched-tokens",
        "Token budget of one step.",
        variable="KVMETER_MAX_NUM_BATCHED_TOKENS",
        type=_count,
        metavar="N",
        default="2048",
    )
    add(
        "--step-target-ms",
        "How long a step may take beside a stream: a long prompt is cut into chunks of that time.",
        type=_count,
        metavar="N",
        default="200",
    )
    add(
        "--max-queue-wait-seconds",
        "A request that waits longer is refused as overloaded.",
        type=_count,
        metavar="N",
        default="60",
    )
    add(
        "--enable-prefix-caching",
        "Reuse KV blocks and grant leases.",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    add(
        "--enable-chunked-prefill",
        "Compute a long prompt in several steps.",
        action=argparse.BooleanOptionalAction,
        default=True,
    )


def _add_comparisons(add: Any) -> None:
    add(
        "--scheduling",
        "For comparison: static fills a batch only when the last one has run dry.",
        type=_one_of("continuous", "static"),
        metavar="{continuous,static}",
        default="continuous",
    )
    add(
        "--kv-layout",
        "For comparison: contiguous reserves room for prompt and max_tokens at admission.",
        type=_one_of("paged", "contiguous"),
        metavar="{paged,contiguous}",
        default="paged",
    )


def _add_machine(add: Any) -> None:
    add("--block-size", "Tokens a KV block.", type=_count, metavar="N", default="16")
    add(
        "--kv-cache-memory",
        "Size of the KV pool in bytes; if absent 15 %% of memory, at least eight contexts, and on "
        "a GPU what --gpu-memory-utilization leaves.",
        variable="KVMETER_KV_CACHE_MEMORY",
        type=_count,
        metavar="BYTES",
    )
    add(
        "--gpu-memory-utilization",
        "Share of the GPU's memory for weights and KV pool; steps work in the rest.",
        variable="KVMETER_GPU_MEMORY_UTILIZATION",
        type=_share,
        metavar="SHARE",
        default="0.85",
    )
    add(
        "--num-threads",
        "Threads that compute on the CPU; if absent one for each physical core.",
        variable="KVMETER_NUM_THREADS",
        type=_count,
        metavar="N",
    )
    add(
        "--dtype",
        "Number format; auto takes bfloat16 where the processor is fast at it.",
        variable="KVMETER_DTYPE",
        type=_one_of("auto", "float32", "bfloat16"),
        metavar="{auto,float32,bfloat16}",
        default="auto",
    )
    add(
        "--device",
        "Where the model runs.",
        variable="KVMETER_DEVICE",
        type=_one_of("cpu", "cuda"),
        metavar="{cpu,cuda}",
        default="cpu",
    )
    add(
        "--native-kernels",
        "Compute in C where model and processor allow it; needs a C compiler (cc) once.",
        variable="KVMETER_NATIVE_KERNELS",
        action=argparse.BooleanOptionalAction,
        default="1",
    )
    add(
        "--tensor-parallel-size",
        "GPUs that share one model; only 1 for now.",
        type=_one,
        metavar="N",
        default="1",
    )


def _add_leases(add: Any) -> None:
    add(
        "--lease-cap-bytes",
        "KV bytes that all leases may pin; if absent 75 %% of the pool. One whole context always "
        "stays free.",
        variable="KVMETER_LEASE_CAP_BYTES",
        type=_amount,
        metavar="BYTES",
    )
    add(
        "--lease-quota-bytes",
        "KV bytes that the leases of one namespace may pin; if absent a quarter of what all "
        "may, at least one whole context.",
        variable="KVMETER_LEASE_QUOTA_BYTES",
        type=_amount,
        metavar="BYTES",
    )
    add(
        "--lease-host-bytes",
        "Host memory for leases beside a GPU; unused with --device cpu.",
        variable="KVMETER_LEASE_HOST_BYTES",
        type=_amount,
        metavar="BYTES",
        default=str(8 << 30),
    )
    add(
        "--lease-disk-bytes",
        "Disk for the leases that outlive the engine, in the data folder; 0 keeps none.",
        variable="KVMETER_LEASE_DISK_BYTES",
        type=_amount,
        metavar="BYTES",
        default=str(8 << 30),
    )


def _switch(parser: argparse.ArgumentParser, variable: str, text: Any) -> bool:
    if text not in ("0", "1"):
        parser.error(f"{variable}: not 0 or 1: {text}")
    return bool(text == "1")


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text}")
    return path


def _address(text: str) -> str:
    try:
        parse_address(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"not a whole number above zero: {text}")
    return int(text)


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a whole number: {text}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"not a number above 0 and at most 1: {text}")
    return share


def _one(text: str) -> int:
    if _count(text) != 1:
        raise argparse.ArgumentTypeError(f"this engine runs a model on one device: {text}")
    return 1


def _one_of(*choices: str) -> Any:
    """Like argparse's `choices`, which do not check a default from the environment."""

    def check(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"not one of {', '.join(choices)}: {text}")
        return text

    return check
