"""What can go wrong in an engine, by class. Each message is one sentence for an operator.

EngineError
├── FrameError      a frame, or a value in it, is not what the protocol says
├── AddressError    an engine address cannot be read, bound or reached
└── JournalError    the journal cannot be locked, read or written; the engine must stop
"""


class EngineError(Exception):
    """Root of everything that the engine raises on purpose."""


class FrameError(EngineError):
    """A frame, or a value in it, is not what the protocol says."""


class AddressError(EngineError):
    """An engine address cannot be read, bound or reached."""


class JournalError(EngineError):
    """The journal cannot be locked, read or written; the engine must stop."""
