"""The gateway's Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class Metrics:
    """Counters since the start of this process.

    requests       by route template and HTTP status (499: the client went away)
    tokens         settled, by meter
    requests_lost  requests of the engine's journal that the ledger lacked at start
    cache_waiting  requests that wait now for an entry that another one writes
    cache_waits    such waits that have ended, by how: `read` what they waited for; `vanished`, it
                   never came and they went on; `timed_out`; `stopped`, by the client or a drain;
                   `refused`, too many waited
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvmeter_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "kvmeter_tokens", "Tokens settled.", ["meter"], registry=self.registry
        )
        self.requests_lost = Gauge(
            "kvmeter_ledger_requests_lost",
            "Requests of the engine's journal that the ledger lacked at start.",
            registry=self.registry,
        )
        self.cache_waiting = Gauge(
            "kvmeter_cache_waiting",
            "Requests that wait for an entry that another request writes.",
            registry=self.registry,
        )
        self.cache_waits = Counter(
            "kvmeter_cache_waits", "Waits for an entry.", ["outcome"], registry=self.registry
        )
