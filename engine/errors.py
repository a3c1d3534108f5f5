"""All exceptions of the engine and of its client, as one tree.

EngineError
├── ModelFileError      a model file is missing, damaged or inconsistent with the others
├── ModelFetchError     the default model could not be fetched
├── KVCacheTooLarge     the machine cannot allocate the memory asked for the KV cache
├── UnsupportedModel    the model folder is complete, but this engine cannot run it
├── KernelsUnavailable  the C kernels cannot run here; torch computes instead
├── KVCacheTooSmall     the memory given to the KV cache holds not even one block
├── FrameError          a frame, or a value in it, violates the protocol
├── AddressError        an engine address cannot be read, bound or reached
├── EngineLost          raised by the client: its link ended, or could not be made in time
├── JournalError        the journal cannot be locked, read or written; the engine must stop
├── LeaseFileError      a lease's file cannot be used; the lease is dropped
│   ├── LeaseFileCorrupt    it is torn or damaged
│   └── LeaseFileForeign    another model, number format, layout or version wrote it
├── DeviceLost          the device computes nothing any more; the engine must stop
├── StepsFailing        nothing could be computed in many steps in a row; the engine must stop
└── SettingError        a command line value or a standard input that cannot be used here
"""

from pathlib import Path


class EngineError(Exception):
    """The root. Its text is one sentence for the operator."""


class ModelFileError(EngineError):
    """A model file is missing, damaged or inconsistent with the others."""

    def __init__(self, problem: str, path: Path, cure: str) -> None:
        super().__init__(f"{problem}: {path}; {cure}")
        self.problem = problem
        self.path = path
        self.cure = cure


class ModelFetchError(EngineError):
    """The default model could not be fetched."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(f"Could not fetch the default model: {problem}; {cure}")
        self.problem = problem
        self.cure = cure


class KVCacheTooLarge(EngineError):
    """The machine cannot allocate the memory asked for the KV cache."""

    def __init__(self, asked_bytes: int) -> None:
        super().__init__(
            f"KV cache does not fit into memory: {asked_bytes} bytes; "
            "name a smaller --kv-cache-memory"
        )
        self.asked_bytes = asked_bytes


class UnsupportedModel(EngineError):
    """The model folder is complete, but this engine cannot run it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"Unsupported model: {path}; {what}")
        self.path = path
        self.what = what


class KernelsUnavailable(EngineError):
    """The C kernels cannot run here; torch computes instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"C kernels are unavailable: {reason}")
        self.reason = reason


class KVCacheTooSmall(EngineError):
    """The memory given to the KV cache holds not even one block."""

    def __init__(self, given_bytes: int, block_bytes: int) -> None:
        super().__init__(
            f"KV cache memory is too small: {given_bytes} bytes; one block takes {block_bytes}"
        )
        self.given_bytes = given_bytes
        self.block_bytes = block_bytes


class FrameError(EngineError):
    """A frame, or a value in it, violates the protocol."""


class AddressError(EngineError):
    """An engine address cannot be read, bound or reached."""


class EngineLost(EngineError):
    """A client's link to the engine ended, or could not be made in time."""


class JournalError(EngineError):
    """The journal cannot be locked, read or written; the engine must stop."""


class LeaseFileError(EngineError):
    """A lease's file cannot be used; the lease is dropped."""


class LeaseFileCorrupt(LeaseFileError):
    """The file is torn or damaged."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"Damaged lease file: {path.name}")
        self.path = path


class LeaseFileForeign(LeaseFileError):
    """Another model, number format, layout or version wrote the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"Foreign lease file: {path.name}")
        self.path = path


class DeviceLost(EngineError):
    """The device computes nothing any more; the engine must stop."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The device failed, so this engine must be started again: {reason}")
        self.reason = reason


class StepsFailing(EngineError):
    """Nothing could be computed in many steps in a row; the engine must stop."""

    def __init__(self, num_steps: int, reason: str) -> None:
        super().__init__(
            f"{num_steps} steps in a row failed, so this engine must be started again: {reason}"
        )
        self.num_steps = num_steps
        self.reason = reason


class SettingError(EngineError):
    """A command line value or a standard input that cannot be used on this machine."""
