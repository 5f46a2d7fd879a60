"""What a predictor and an orchestrator must agree on about a target model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TargetGeometry:
    """The routed part of a target. revision names the routers (a digest or a model revision): predictions made for other
    routers are worthless even when every size agrees."""

    name: str
    revision: str
    vocab_size: int
    hidden_size: int
    moe_layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "moe_layers", "experts", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"geometry field {name} is {value!r}; a whole number of at least 1 is needed.")
        if self.top_k > self.experts:
            raise ValueError(f"geometry has top_k {self.top_k} above its {self.experts} experts.")
        if self.experts > 65536:
            raise ValueError(f"geometry has {self.experts} experts; the wire format holds at most 65536.")

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, equal exactly when all fields are equal."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @property
    def words(self) -> int:
        """uint64 words of one layer's expert bitset."""
        return -(-self.experts // 64)
