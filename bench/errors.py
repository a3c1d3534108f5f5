"""What ends an exhibit: one sentence on standard error and exit code 1.

BenchError
└── CountsDiffer
"""


class BenchError(Exception):
    """A figure would be wrong or misleading; the exhibit ends with exit code 1."""


class CountsDiffer(BenchError):
    """The client and the engine's record disagree about tokens."""
