"""The gateway's own counters, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """Counters since the start of this process.

    requests   by route template and HTTP status (499: the client went away)
    tokens     settled, by meter
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvmeter_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "kvmeter_tokens", "Tokens settled.", ["meter"], registry=self.registry
        )
