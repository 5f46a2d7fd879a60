"""The draft tree against a brute-force reading: every path run alone through the head, without caches or tree masks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_heads import on_kernels
from torch import nn

from ecospec_orchestrator.core import DraftTree, SettingsError
from ecospec_orchestrator.drafting.eagle3 import Eagle3Drafter, eagle3_drafter
from ecospec_orchestrator.drafting.eagle3_head import Eagle3Config, Eagle3Head
from ecospec_orchestrator.drafting.target import TargetFacts

CONFIG = Eagle3Config(24, 40, 4, 2, 8, 30, 50, 1e-5, 1e4, (0, 1, 2))
DEPTH, TOP_K = 3, 2


def make_head() -> Eagle3Head:
    torch.manual_seed(3)
    head = Eagle3Head(CONFIG)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    ids = torch.randperm(50)[:30].sort().values
    head.d2t.copy_(ids - torch.arange(30))
    head.t2d[ids] = True
    head.midlayer.self_attn.layer_idx = 0
    return head


@pytest.fixture(scope="module")
def drafter() -> Eagle3Drafter:
    torch.manual_seed(4)
    return Eagle3Drafter(on_kernels(make_head()), nn.Embedding(50, 24).requires_grad_(False), DEPTH, TOP_K, kv_pages=16)


@torch.no_grad()
def run_alone(drafter: Eagle3Drafter, features: torch.Tensor, tokens: list[int], path: list[int]) -> torch.Tensor:
    """Draft probabilities after the fed tokens and a drafted path: plain causal attention over one growing sequence."""
    head = drafter.head
    attention = head.midlayer.self_attn
    rows = head.fc(features)
    for at in range(len(path) + 1):
        fed = torch.tensor(tokens + path[:at])
        x = head.midlayer.inputs(drafter.embed_tokens(fed), rows)
        q, k, v = attention.qkv(x, torch.arange(len(fed)))
        k, v = (t.repeat_interleave(2, 0) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = head.midlayer.finish(rows, out.transpose(0, 1).flatten(1))
        if at < len(path):
            rows = torch.cat([rows, hidden[-1:]])  # the head's own state stands in for the next feature
    return head.lm_head(head.norm(hidden[-1])).softmax(-1)


def path_of(tree, node: int) -> list[int]:
    path = []
    while node != -1:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path[::-1]


def feed(drafter: Eagle3Drafter, features: torch.Tensor, tokens: list[int], cuts: list[int]):
    """Feed in pieces, with a draft after each: a draft must leave nothing behind."""
    state = drafter.new_state()
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        drafter.extend([state], [features[start:stop]], [np.array(tokens[start:stop])])
        (tree,) = drafter.draft([state])
    return state, tree


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 7]])
def test_every_node_has_the_probability_of_its_path_run_alone(drafter: Eagle3Drafter, cuts: list[int]) -> None:
    torch.manual_seed(5)
    features, tokens = torch.randn(9, 72), torch.randint(0, 50, (9,)).tolist()
    _, tree = feed(drafter, features, tokens, cuts)
    assert len(tree) == TOP_K + (DEPTH - 1) * TOP_K**2
    target_ids = drafter.head.target_ids.tolist()
    for node in range(len(tree)):
        path = path_of(tree, node)
        expected = 1.0
        for depth, token in enumerate(path):
            probabilities = run_alone(drafter, features, tokens, path[:depth])
            expected *= probabilities[target_ids.index(token)].item()
            best = {target_ids[i] for i in probabilities.topk(TOP_K).indices.tolist()}
            assert token in best
        assert tree.probabilities[node] == pytest.approx(expected, rel=1e-4)
        assert tree.depths[node] == len(path)


def test_each_level_expands_the_most_likely_nodes(drafter: Eagle3Drafter) -> None:
    _, tree = feed(drafter, torch.randn(5, 72), [1, 2, 3, 4, 5], [])
    for level in range(1, DEPTH):
        nodes = np.flatnonzero(tree.depths == level)
        expanded = set(tree.parents[tree.depths == level + 1].tolist())
        best = sorted(nodes.tolist(), key=lambda n: (-tree.probabilities[n], n))[:TOP_K]
        assert expanded == set(best)
    assert all(tree.parents[n] < n for n in range(len(tree)))
    inner = tree.parents >= 0
    assert (tree.probabilities[inner] <= tree.probabilities[tree.parents[inner]]).all()


def test_requests_drafted_together_get_what_they_get_alone(drafter: Eagle3Drafter) -> None:
    torch.manual_seed(6)
    inputs = [(torch.randn(n, 72), torch.randint(0, 50, (n,)).tolist()) for n in (2, 6, 4)]
    alone = [feed(drafter, f, t, [])[1] for f, t in inputs]
    states = [drafter.new_state() for _ in range(4)]  # the last one has been fed nothing
    drafter.extend(
        states,
        [f for f, _ in inputs] + [torch.empty(0, 72)],
        [np.array(t) for _, t in inputs] + [np.empty(0, np.int64)],
    )
    together = drafter.draft(states)
    for a, b in zip(alone, together[:3], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()
        np.testing.assert_allclose(a.probabilities, b.probabilities, rtol=1e-5)
    assert len(together[3]) == 0


def test_drafting_stops_at_the_level_that_is_not_wanted(drafter: Eagle3Drafter) -> None:
    torch.manual_seed(7)
    state, seen = drafter.new_state(), []
    drafter.extend([state], [torch.randn(4, 72)], [np.array([1, 2, 3, 4])])

    def another_level(trees: list[DraftTree], level: int) -> bool:
        seen.append((level, len(trees[0])))
        return level < 2

    (whole,) = drafter.draft([state])
    (short,) = drafter.draft([state], another_level)
    assert [level for level, _ in seen] == [1, 2] and seen[-1][1] == len(short)
    assert short.tokens.tolist() == whole.tokens[whole.depths <= 2].tolist()
    assert drafter.draft([state])[0].tokens.tolist() == whole.tokens.tolist()


def write(directory: Path, **changes: object) -> None:
    head = make_head()
    save_file({k: v.contiguous() for k, v in head.state_dict().items()}, directory / "model.safetensors")
    config = {**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__}, **changes}
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: Path, embed_tokens: nn.Module) -> Eagle3Drafter:
    return eagle3_drafter(directory, TargetFacts("tiny", 24, 50, 3, embed_tokens), DEPTH, TOP_K, kv_pages=16)


def test_a_loaded_head_drafts_like_the_one_that_was_saved(tmp_path: Path, drafter: Eagle3Drafter) -> None:
    write(tmp_path)
    loaded = load(tmp_path, drafter.embed_tokens)
    features, tokens = torch.randn(5, 72), [1, 2, 3, 4, 5]
    _, expected = feed(drafter, features, tokens, [])
    _, found = feed(loaded, features, tokens, [])
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=0.2)  # bfloat16 weights
    fusion, vocabulary = 2 * 72 * 24, 2 * 24 * 30
    layer = 2 * (48 * 32 + 2 * 48 * 16 + 32 * 24 + 3 * 24 * 40) + 4 * 3 * 24
    assert loaded.bytes_read(3, True) == fusion + 3 * layer + 3 * vocabulary  # feeding and two expansions run the layer
    assert loaded.bytes_read(1, False) == vocabulary and loaded.bytes_read(0, False) == 0


@pytest.mark.parametrize(("name", "wrong"), [("hidden_size", 48), ("vocab_size", 51)])
def test_a_head_for_another_target_is_refused_by_name(tmp_path: Path, name: str, wrong: int) -> None:
    write(tmp_path, **{name: wrong})
    with pytest.raises(SettingsError, match=f"has {name} {wrong}, but the target tiny has"):
        load(tmp_path, nn.Embedding(50, 24))


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="config.json is missing"):
        load(tmp_path, nn.Embedding(50, 24))
