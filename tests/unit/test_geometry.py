"""Byte accounting from published configurations against the EcoSpec paper's Table 2, and refusals."""

import pytest
import torch
from published_configs import DEEPSEEK_V31, GLM_45_AIR, GPT_OSS_120B, MIXTRAL_8X7B, OLMOE_1B_7B, QWEN3_235B
from transformers import CONFIG_MAPPING

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.torch.families import FAMILIES
from ecospec_orchestrator.engine.torch.geometry import (
    geometry_of,
    kv_layout_of,
    moe_layers_of,
    quantisation_of,
    step_bytes_of,
    step_gigabytes,
)

PUBLISHED = [QWEN3_235B, DEEPSEEK_V31, GPT_OSS_120B, MIXTRAL_8X7B, OLMOE_1B_7B, GLM_45_AIR]


@pytest.mark.parametrize(
    ("config", "experts", "gigabytes"),
    [(QWEN3_235B, 23.7, 99.3), (QWEN3_235B, 20.5, 88.1), (DEEPSEEK_V31, 31.4, 97.3), (DEEPSEEK_V31, 31.2, 96.8)],
)
def test_bytes_of_a_step_reproduce_table_2(config: dict, experts: float, gigabytes: float) -> None:
    assert step_gigabytes(config, experts) == pytest.approx(gigabytes, rel=0.015)


@pytest.mark.parametrize(("experts", "gigabytes"), [(11.6, 5.5), (10.6, 5.0)])
def test_routed_part_of_gpt_oss(experts: float, gigabytes: float) -> None:
    """Of the paper's 6.0 and 5.5 GB 0.5 GB are not routed, less than the attention alone: that remainder cannot be derived."""
    sizes = step_bytes_of(GPT_OSS_120B)
    assert experts * 36 * sizes.per_expert / 1e9 == pytest.approx(gigabytes, rel=0.015)
    assert sizes.attention / 1e9 > 1.5


def test_the_papers_61_layers_do_not_reproduce_its_own_figure() -> None:
    assert len(moe_layers_of(DEEPSEEK_V31)) == 58
    sizes = step_bytes_of(DEEPSEEK_V31)
    assert (31.4 * 61 * sizes.per_expert + sizes.attention + sizes.shared + sizes.head) / 1e9 > 97.3 * 1.035


@pytest.mark.parametrize(
    ("config", "megabytes"),
    [(QWEN3_235B, 37.75), (DEEPSEEK_V31, 44.04), (GPT_OSS_120B, 13.24), (MIXTRAL_8X7B, 352.3), (OLMOE_1B_7B, 12.58)],
)
def test_bytes_per_routed_expert(config: dict, megabytes: float) -> None:
    assert step_bytes_of(config).per_expert / 1e6 == pytest.approx(megabytes, rel=1e-3)


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda c: c["model_type"])
def test_sizes_equal_those_of_transformers_own_model(config: dict) -> None:
    """Oracle: count the elements of the family's class, built without memory. Two layers of each kind stand for all."""
    import transformers

    small = {**config, "num_hidden_layers": config.get("first_k_dense_replace", 0) + 2}
    small.pop("quantization_config", None)
    family = FAMILIES[config["model_type"]]
    values = {k: v for k, v in small.items() if k not in ("torch_dtype", "model_type")}
    built = CONFIG_MAPPING[config["model_type"]](**values)
    with torch.device("meta"):
        model = getattr(transformers, family.model_class)(built)
    sizes, geometry = step_bytes_of(small), geometry_of(small)
    moe = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    assert (geometry.moe_layers, geometry.experts) == (len(moe), moe[0].experts.num_experts)
    experts = sum(p.numel() for p in moe[0].experts.parameters()) // geometry.experts
    assert sizes.per_expert == 2 * experts
    # A vector (norm, bias, sinks) and a router is float32, a matrix bfloat16.
    kept = lambda name, t: t.numel() * (4 if t.ndim == 1 or ".gate.weight" in name or ".router." in name else 2)
    tensors = model.state_dict().items()
    attention = sum(kept(n, t) for n, t in tensors if ".self_attn." in n)
    rest = sum(
        kept(n, t)
        for n, t in tensors
        if ".self_attn." not in n and ".mlp.experts." not in n and n.startswith(("model.layers.", "model.norm."))
    )
    assert (sizes.attention, sizes.shared) == (attention, rest)
    assert sizes.head == 2 * model.lm_head.weight.numel()


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda c: c["model_type"])
def test_the_cache_is_laid_out_the_same_from_the_file_and_from_transformers(config: dict) -> None:
    values = {k: v for k, v in config.items() if k not in ("torch_dtype", "model_type", "quantization_config")}
    layout = kv_layout_of(config)
    assert kv_layout_of(CONFIG_MAPPING[config["model_type"]](**values).to_dict()) == layout
    assert step_bytes_of(config).kv_per_token == layout.bytes_per_token


def test_dense_layers_of_qwen3() -> None:
    config = {**QWEN3_235B, "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert moe_layers_of(config) == (1, 5, 7)


def test_geometry_takes_names_that_newer_files_use() -> None:
    newer = {k: v for k, v in QWEN3_235B.items() if k not in ("num_experts", "torch_dtype")}
    newer |= {"num_local_experts": 128, "dtype": "bfloat16"}
    assert step_bytes_of(newer) == step_bytes_of(QWEN3_235B)
    assert geometry_of(newer, "q", "r") == geometry_of(QWEN3_235B, "q", "r")
    assert geometry_of(newer).top_k == 8


def test_float32_weights_take_twice_the_bytes() -> None:
    assert step_bytes_of({**QWEN3_235B, "torch_dtype": "float32"}).per_expert == 2 * 37748736


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="llama"), "model_type 'llama'; supported .* deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe"),
        (dict(hidden_size=None), "hidden_size None; a whole number of at least 1"),
        (dict(num_experts="128"), "num_experts '128'; a whole number"),
        (dict(torch_dtype="int8"), "dtype 'int8'; bfloat16, float16 and float32"),
        (dict(quantization_config=dict(quant_method="gptq")), "quant_method 'gptq', which is not supported"),
        (dict(quantization_config=dict(quant_method="mxfp4")), "'mxfp4', which is not supported for qwen3_moe"),
        (
            dict(quantization_config=dict(quant_method="fp8", weight_block_size=None)),
            r"weight_block_size None; 'e4m3' with \[128, 128\]",
        ),
        (
            dict(quantization_config=dict(quant_method="fp8", fmt="e5m2", weight_block_size=[128, 128])),
            "format 'e5m2'",
        ),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(change: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        step_bytes_of({**QWEN3_235B, **change})


def test_published_fp8_is_read_as_fp8() -> None:
    assert [quantisation_of(c) for c in PUBLISHED] == ["none", "fp8", "mxfp4", "none", "none", "none"]
