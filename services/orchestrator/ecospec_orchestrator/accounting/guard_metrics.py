"""Metrics of who was let in and who was not. Keys appear by their names, of which there are as many as in the file of keys."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("admitted", "rate", "quota", "concurrency")
SLOW_PHASES = ("headers", "body", "response", "connections")


class GuardMetrics:
    """Thread-safe. slow_clients: connections ended because nothing came (headers, body), nothing was taken (response), or there were
    too many (connections)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"ecospec_{name}", text, labels, registry=registry)

        self.key_requests = counter(
            "key_requests", "Requests by the name of their key, and what became of them.", ("key", "outcome")
        )
        self.key_tokens = counter(
            "key_tokens", "Tokens by the name of their key: prompt or generated.", ("key", "kind")
        )
        self.auth_failures = counter("auth_failures", "Requests without a valid key.")
        self.slow_clients = counter("slow_clients", "Connections ended by the server's limits.", ("phase",))
        self.deadlines_exceeded = counter("deadlines_exceeded", "Requests ended by their deadline.")
        for phase in SLOW_PHASES:
            self.slow_clients.labels(phase)
