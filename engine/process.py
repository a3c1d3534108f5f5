"""Builds and runs one engine process: journal, model, lease store, core, server."""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from engine.arguments import Arguments
from engine.compute.backend import Kernels, choose_kernels
from engine.compute.dtype import choose_dtype, read_cpuinfo
from engine.compute.kv_cache import bytes_per_block
from engine.compute.loading import LoadedModel, load_model
from engine.compute.memory import engine_config, gpu_pool_bytes, memory_bytes, pin_warning
from engine.compute.model_runner import ModelRunner
from engine.compute.threads import configure_threads, cpu_quota, default_threads, processors
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import SettingError
from engine.journal.journal import Journal
from engine.link.address import bound_url, listen
from engine.link.server import EngineServer
from engine.protocol import EngineInfo
from engine.tiers.lease_files import Origin
from engine.tiers.open_store import open_lease_store


def serve(
    arguments: Arguments, *, clock_ns: Callable[[], int], wall_clock: Callable[[], int]
) -> None:
    """Serve until SIGTERM, SIGINT or, with --until-stdin-closes, the end of stdin.

    `clock_ns` is monotonic; `wall_clock`, in milliseconds, dates files that later processes read.
    Raises EngineError.
    """

    def clock() -> int:
        return clock_ns() // 1_000_000

    journal_folder = arguments.data_dir / "engine" / "journal"
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(journal_folder)))
        stack.enter_context(_pid_file(arguments.data_dir))
        device = _device(arguments.device)
        threads = _set_threads(arguments.num_threads)
        dtype = choose_dtype(arguments.dtype, device=device, cpuinfo=read_cpuinfo())
        kernels = Kernels(None, "torch kernels: --no-native-kernels")
        if arguments.native_kernels:
            kernels = choose_kernels(
                arguments.model,
                arguments.data_dir / "engine" / "kernels",
                dtype=dtype,
                device=device,
                block_size=arguments.block_size,
                clock_ns=clock_ns,
            )
        loaded = load_model(arguments.model, dtype=dtype, device=device, library=kernels.library)
        config = _config(arguments, loaded)
        runner = ModelRunner(loaded.backend, config, entropy=secrets.token_bytes(32))
        info = _info(arguments, loaded, config, engine_id=journal.engine_id)
        on_gpu = device.type == "cuda"
        store = stack.enter_context(
            open_lease_store(
                arguments.data_dir / "engine" / "leases",
                runner,
                config,
                Origin(info.weights_digest, info.dtype, runner.kv_layout),
                host_bytes=arguments.lease_host_bytes if on_gpu else 0,
                disk_bytes=arguments.lease_disk_bytes if config.enable_prefix_caching else 0,
                clock_ns=clock_ns,
                wall_clock=wall_clock,
            )
        )
        core = EngineCore(config, runner, boot_id=info.engine_boot_id, journal=journal, store=store)
        listener = listen(arguments.listen)
        server = EngineServer(core, info, listener, journal, clock)
        if arguments.until_stdin_closes:
            server.stop_at_end_of(sys.stdin.fileno())
        else:
            _stop_on_signals(server)
        url, may_pin = bound_url(listener, arguments.listen), arguments.lease_cap_bytes != 0
        _announce(info, config, url, f"{kernels.reason}; {threads}", may_pin=may_pin)
        server.run()


def _set_threads(stated: int | None) -> str:
    """Set how many threads compute; return how many, and why, for the operator."""
    number = stated or default_threads(read_cpuinfo(), processors(), cpu_quota())
    configure_threads(number)
    reason = "one a physical core" if stated is None else "--num-threads"
    return f"{number} thread{'s' if number > 1 else ''}: {reason}"


def _stop_on_signals(server: EngineServer) -> None:
    """Stop at SIGTERM or SIGINT.

    A Python handler does not run while the loop sleeps. A signal that arrives just before the sleep
    does not interrupt it, so each signal also makes a pipe readable, which wakes the loop.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    server.stop_at_end_of(read_end)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("No CUDA device on this machine: start with --device cpu.")
    return torch.device(name)


def _config(arguments: Arguments, loaded: LoadedModel) -> EngineConfig:
    shape, device = loaded.backend.shape, loaded.backend.device
    max_model_len = arguments.max_model_len or shape.max_model_len
    if max_model_len > shape.max_model_len:
        raise SettingError(
            f"--max-model-len is {max_model_len}, but the model allows {shape.max_model_len}."
        )
    pool_bytes = arguments.kv_cache_memory
    if pool_bytes is None and device.type == "cuda":
        pool_bytes = gpu_pool_bytes(
            *torch.cuda.mem_get_info(device), arguments.gpu_memory_utilization
        )
    return engine_config(
        bytes_per_block=bytes_per_block(shape, loaded.backend.dtype, arguments.block_size),
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        memory_bytes=memory_bytes(),
        kv_cache_bytes=pool_bytes,
        lease_cap_bytes=arguments.lease_cap_bytes,
        lease_quota_bytes=arguments.lease_quota_bytes,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        step_target_ms=arguments.step_target_ms,
        max_queue_wait_ms=arguments.max_queue_wait_seconds * 1000,
        enable_prefix_caching=arguments.enable_prefix_caching,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        scheduling=arguments.scheduling,
        kv_layout=arguments.kv_layout,
    )


def _info(
    arguments: Arguments, loaded: LoadedModel, config: EngineConfig, *, engine_id: str
) -> EngineInfo:
    return EngineInfo(
        engine_id=engine_id,
        engine_boot_id=f"eng_{secrets.token_hex(16)}",
        model_id=arguments.model_id,
        weights_digest=loaded.weights_digest,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        max_request_tokens=config.max_request_tokens,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        pin_cap_blocks=config.pin_cap_blocks,
        dtype=str(loaded.backend.dtype).removeprefix("torch."),
        device=loaded.backend.device.type,
        stop_token_ids=loaded.stop_token_ids,
        default_sampling=loaded.default_sampling,
    )


@contextmanager
def _pid_file(data_dir: Path) -> Iterator[None]:
    path = data_dir / "run" / "engine.pid"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise SettingError(f"Cannot write {path}: {error.strerror}.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _announce(
    info: EngineInfo, config: EngineConfig, url: str, computed_by: str, *, may_pin: bool
) -> None:
    sys.stdout.write(
        f"engine ready: {url}\n"
        f"  {info.model_id}, {info.dtype} on {info.device}, up to {config.max_model_len} tokens; "
        f"KV pool {config.num_blocks} blocks of "
        f"{config.block_size} tokens; leases may pin {config.pin_cap_blocks} of them, "
        f"one namespace {config.namespace_quota_blocks}\n"
        f"  {computed_by}\n"
    )
    if may_pin and (warning := pin_warning(config)) is not None:
        sys.stdout.write(f"  warning: {warning}\n")
    sys.stdout.flush()
