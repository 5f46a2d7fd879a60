"""Two ranks in processes of their own choose the same nodes, whatever the predictor of rank 0 does."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest
import trt_ranks
from ports import free_port

from ecospec_orchestrator.engine.tensorrt_llm.plugin.ranks import RanksError, check_mapping, join


def test_two_ranks_choose_the_same_nodes_also_when_the_predictor_fails() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address = f"127.0.0.1:{free_port()}"
    process = context.Process(target=trt_ranks.run, args=(1, address, results))
    process.start()
    assert results.get(timeout=120) == "ready"  # it has imported torch
    first = trt_ranks.run_rank(0, address)  # this process is the other rank
    second = results.get(timeout=60)
    process.join(timeout=60)
    assert process.exitcode == 0
    for same in ("eager", "stock", "graph", "loads", "bits"):
        assert first[same] == second[same], same
    by_step = dict(zip(trt_ranks.STEPS, zip(first["eager"], first["stock"], strict=True), strict=True))
    for step, (chosen, stock) in by_step.items():
        assert (chosen == stock) is (step not in ("answers", "answers again")), step
    assert first["fallbacks"] == {"late": 1, "busy": 1, "error": 2, "unavailable": 1}
    assert (first["chosen"], second["chosen"], second["fallbacks"]) == (2, 0, {})
    # Looks at steps 0, 2, 4 and 6: nothing, a broken file, and a table each.
    assert first["loads"] == [0] * 4 + [1] * 2 + [2] * 10
    assert first["bits"] != 0


def test_one_rank_needs_no_other() -> None:
    ranks = join(0, 1, "")
    assert (ranks.rank, ranks.count, ranks.group) == (0, 1, None)


def test_a_rendezvous_without_a_port_is_refused() -> None:
    with pytest.raises(RanksError, match="'localhost'; host:port"):
        join(0, 2, "localhost")


@pytest.mark.parametrize(("name", "value"), [("pp_size", 2), ("cp_size", 4), ("enable_attention_dp", True)])
def test_ranks_that_see_other_requests_or_layers_are_refused(name: str, value: object) -> None:
    mapping = {"rank": 3, "world_size": 8, "pp_size": 1, "cp_size": 1, "enable_attention_dp": False}
    assert check_mapping(SimpleNamespace(**mapping)) == (3, 8)
    with pytest.raises(RanksError, match=f"{name} {value}"):
        check_mapping(SimpleNamespace(**{**mapping, name: value}))
