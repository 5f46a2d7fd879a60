"""The routed part of a target from its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .geometry import TargetGeometry

EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")  # the families' names for the number of experts


def routed_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the layers with routed experts; the others are dense. num_hidden_layers must be a number."""
    first, every = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if i >= first and i not in dense and (i + 1) % every == 0)


def geometry_from_config(config: Mapping[str, Any], name: str, revision: str) -> TargetGeometry:
    """revision should name the routers' weights, which a configuration cannot. Raises ValueError with one sentence."""
    for key in ("num_hidden_layers", "num_experts_per_tok"):
        if type(config.get(key)) is not int or not 1 <= config[key] <= 65536:
            raise ValueError(f"it has {key} {config.get(key)!r}; a whole number from 1 to 65536 is needed.")
    experts = next((config[key] for key in EXPERTS_KEYS if config.get(key) is not None), None)
    if experts is None:
        raise ValueError(f"it has none of {', '.join(EXPERTS_KEYS)}; a mixture-of-experts model is needed.")
    return TargetGeometry(
        name=name,
        revision=revision,
        vocab_size=config.get("vocab_size"),  # type: ignore[arg-type]  # checked by TargetGeometry, as all of these
        hidden_size=config.get("hidden_size"),  # type: ignore[arg-type]
        moe_layers=len(routed_layers(config)),
        experts=experts,
        top_k=config["num_experts_per_tok"],
    )
