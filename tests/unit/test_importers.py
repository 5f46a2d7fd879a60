"""Every engine's documented payload becomes the same document, and what does not fit is refused by name."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_payloads as payloads
import numpy as np
import pytest
import torch
from engine_payloads import GEOMETRY, LAYERS, OUTPUT, PROMPT, ROUTES, TARGET, TOP_K, b64, expected, make_routes, npy

from ecospec_predictor.collect.importers import IMPORTERS
from ecospec_predictor.collect.recorder import from_sglang_recorder, load_recording
from ecospec_predictor.collect.target import Target
from ecospec_proto.traces import TraceDocument, TraceError, check_document, document_id


def same(found: TraceDocument, wanted: TraceDocument) -> None:
    check_document(found, GEOMETRY)
    for name in wanted.__dataclass_fields__:
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name


ALL: dict[str, tuple[str, Callable[[], Any]]] = {
    "vllm completion": ("vllm", payloads.vllm_completion),
    "vllm completion, uint8": ("vllm", lambda: payloads.vllm_completion(ROUTES.astype(np.uint8))),
    "vllm completion, int32": ("vllm", lambda: payloads.vllm_completion(ROUTES.astype(np.int32))),
    "vllm chat": ("vllm", payloads.vllm_chat),
    "vllm 0.21": ("vllm", payloads.vllm_split),
    "vllm offline": ("vllm", payloads.tensorrt_llm),
    "sglang generate": ("sglang", payloads.sglang_generate),
    "sglang batch": ("sglang", lambda: [payloads.sglang_generate()]),
    "sglang with request": ("sglang", payloads.sglang_request),
    "sglang chat": ("sglang", payloads.sglang_chat),
    "tensorrt-llm": ("tensorrt-llm", payloads.tensorrt_llm),
    "lightllm, layers first": ("lightllm", lambda: payloads.lightllm(True)),
    "lightllm, tokens first": ("lightllm", lambda: payloads.lightllm(False)),
    "ecospec": ("ecospec", payloads.ecospec),
}


@pytest.mark.parametrize("name", ALL)
def test_the_documented_payload_becomes_the_normal_form(name: str) -> None:
    engine, make = ALL[name]
    (document,) = IMPORTERS[engine](make(), TARGET, "chat")
    wanted = expected()
    if engine == "ecospec":  # the answer does not say where the prompt ends
        wanted = replace(wanted, document_id=document_id(PROMPT + OUTPUT))
    same(document, wanted)


def test_numpys_own_files_are_the_documented_bytes() -> None:
    import io

    file = io.BytesIO()
    np.save(file, ROUTES)
    assert file.getvalue() == npy(ROUTES)


def test_the_recorder_gives_the_same_but_for_the_token_that_was_not_computed(tmp_path: Path) -> None:
    path = payloads.save_recording(tmp_path / "dump.pt", payloads.recording())
    (document,) = from_sglang_recorder(load_recording(path), TARGET, "chat")
    wanted = expected(ROUTES, PROMPT, OUTPUT[:-1])
    same(document, wanted)


def test_several_choices_are_several_documents_of_one_group() -> None:
    response = payloads.vllm_chat()
    other = make_routes(6, seed=5)
    response["choices"].append({"token_ids": [31, 32, 33], "routed_experts": b64(npy(other))})
    first, second = IMPORTERS["vllm"](response, TARGET, "chat")
    same(first, expected())
    same(second, expected(other, PROMPT, [31, 32, 33]))
    assert first.document_id != second.document_id
    assert first.document_id.partition(":")[0] == second.document_id.partition(":")[0]


def test_a_record_may_name_its_own_domain() -> None:
    (document,) = IMPORTERS["vllm"]({"response": payloads.vllm_completion(), "domain": "code"}, TARGET, "chat")
    assert document.domain == "code"


def test_rows_before_an_offset_and_cached_positions_are_unknown() -> None:
    (document,) = IMPORTERS["vllm"](payloads.vllm_offset(2), TARGET, "chat")
    wanted = ROUTES.copy()
    wanted[:2] = -1
    same(document, expected(wanted))
    routes = ROUTES.copy()
    routes[1:3] = -1
    (document,) = IMPORTERS["vllm"](payloads.vllm_completion(routes), TARGET, "chat")
    same(document, expected(routes))


def test_a_row_for_the_last_token_is_taken_where_an_engine_has_one() -> None:
    routes = make_routes(9)
    (document,) = IMPORTERS["vllm"](payloads.vllm_completion(routes), TARGET, "chat")
    same(document, expected(routes))


def test_a_buffer_that_was_never_written_is_unknown() -> None:
    routes = ROUTES.copy()
    routes[3, 1] = routes[5] = 0
    (document,) = IMPORTERS["vllm"](payloads.vllm_completion(routes), TARGET, "chat")
    wanted = ROUTES.copy()
    wanted[3, 1] = wanted[5] = -1
    same(document, expected(wanted))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lightllm"])
def test_dense_layers_are_left_out_where_the_configuration_tells_which(engine: str) -> None:
    """A model of five layers, of which 0 and 3 are dense; the engines report zeros or -1 for these."""
    target = Target(GEOMETRY, (1, 2, 4))
    whole = np.zeros((8, 5, TOP_K), np.int16)
    whole[:, 3] = -1
    whole[:, [1, 2, 4]] = ROUTES
    record: Any = payloads.vllm_completion(whole)
    if engine == "sglang":
        record = payloads.sglang_generate()
        record["meta_info"]["routed_experts"] = b64(whole.astype("<i4").tobytes())
    elif engine == "lightllm":
        record = payloads.lightllm(True)
        turned = np.ascontiguousarray(whole.swapaxes(0, 1))
        record["routed_experts"] = {"shape": [5, 8, 2], "dtype": "int16", "data": b64(turned.tobytes())}
    (document,) = IMPORTERS[engine](record, target, "chat")
    same(document, expected())
    with pytest.raises(TraceError, match="5 layers, the target has 3 MoE layers|have shape"):
        IMPORTERS[engine](record, TARGET, "chat")


def edited(make: Callable[[], Any], *path: Any, value: Any) -> Any:
    record = copy.deepcopy(make())
    at = record
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return record


ROUTED = ("choices", 0, "routed_experts")
META = ("meta_info", "routed_experts")
BOMB = npy(ROUTES).replace(b"(8, 3, 2), }    ", b"(8000000000, 3, 2), }"[:-5] + b"}")


def claim(shape: str, descr: str = "<i2") -> str:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b64(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + ROUTES.tobytes())


@pytest.mark.parametrize(
    ("engine", "record", "message"),
    [
        ("vllm", 5, "response is no object"),
        ("vllm", {"error": {"message": "too long"}}, "it is an error of the engine: .*too long"),
        ("vllm", {"choices": []}, "neither choices nor outputs"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=None), "--enable-return-routed-experts"),
        ("vllm", edited(payloads.vllm_completion, "choices", 0, "token_ids", value=None), "it has no token_ids"),
        ("vllm", edited(payloads.vllm_completion, "choices", 0, "token_ids", value=[1, "a"]), "it has no token_ids"),
        ("vllm", edited(payloads.vllm_completion, "choices", 0, "token_ids", value=[2**40] * 5), "it has no token_ids"),
        ("vllm", edited(payloads.vllm_completion, "choices", 0, "token_ids", value=OUTPUT[:3]), "have 8 rows .* 7 tokens"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value="%%%"), "no base64"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=b64(b"abc")), "no .npy file"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=b64(npy(ROUTES)[:-2])), "claim shape"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=claim("(10**12, 3, 2)")), "no readable .npy"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=claim("(1000000000000, 3, 2)")), "claim shape"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=claim("(-8, 3, 2)")), "claim"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=claim("(8, 3, 2)", "<f2")), "dtype float16"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=claim("(6,)", "|O")), "dtype object"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=[[[float("nan"), 1.0]] * 3] * 8), "dtype float64"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=[[[1, 2]], [[1]]]), "no array"),
        ("vllm", edited(payloads.vllm_completion, *ROUTED, value=[[[2**70, 1]] * 3] * 8), "dtype object|no array"),
        ("vllm", payloads.vllm_completion(np.where(ROUTES == ROUTES[2, 1, 0], 16, ROUTES).astype(np.int16)), "expert 16"),
        ("vllm", payloads.vllm_completion(ROUTES - np.int16(2)), "expert -2; -1 to 15"),
        ("vllm", payloads.vllm_completion(ROUTES[:, :, :1]), r"shape \(8, 3, 1\)"),
        ("vllm", payloads.vllm_offset(20), "position 20; 0 to 9|rows from position 20|begin at position 20"),
        ("vllm", {"request": 3, "response": payloads.vllm_completion()}, "request is no object"),
        ("sglang", edited(payloads.sglang_generate, *META, value=b64(ROUTES.tobytes()[:-2])), "no whole number of int32"),
        ("sglang", edited(payloads.sglang_generate, *META, value=b64(ROUTES.astype("<i4").tobytes()[:-4])), "47 numbers"),
        ("sglang", edited(payloads.sglang_generate, "meta_info", "completion_tokens", value=9), "9 completion_tokens"),
        ("sglang", edited(payloads.sglang_generate, "meta_info", value=None), "meta_info is no object"),
        ("lightllm", edited(lambda: payloads.lightllm(True), "tokens", value=[[]]), "tokens of one choice"),
        ("lightllm", edited(lambda: payloads.lightllm(True), "routed_experts", "shape", value=[3, 8, 10**12]), "claim"),
        ("lightllm", edited(lambda: payloads.lightllm(True), "routed_experts", "dtype", value="object"), "dtype 'object'"),
        ("ecospec", edited(payloads.ecospec, *ROUTED, "accepted", value=[1] * 9), "accepted is no list"),
        ("ecospec", edited(payloads.ecospec, *ROUTED, "parents", value=[2**40] * 9), "beyond 32 bits"),
        ("ecospec", edited(payloads.ecospec, *ROUTED, "tokens", value=[True] * 9), "tokens is no list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_in_bounded_memory(engine: str, record: Any, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=message):
            IMPORTERS[engine](record, TARGET, "chat")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_lightllm_axes_that_cannot_be_told_apart_are_refused() -> None:
    record = payloads.lightllm(True)
    tokens = PROMPT[:1] + OUTPUT[:2]
    record |= {"prompt_token_ids": tokens[:1], "tokens": [{"id": token} for token in tokens[1:]]}
    square = make_routes(3)
    record["routed_experts"] = {"shape": [3, 3, 2], "dtype": "int16", "data": b64(square.tobytes())}
    with pytest.raises(TraceError, match="may be"):
        IMPORTERS["lightllm"](record, TARGET, "chat")


def test_drafts_of_a_chain_are_recorded_and_the_rejected_ones_marked() -> None:
    routes = make_routes(20)
    passes = [
        payloads.recording_pass(1, 1, PROMPT, 0, routes[:4]),
        payloads.recording_pass(2, 5, [21, 22, 99, 98], 4, routes[4:8]),  # 22 is accepted, 99 and 98 are not
        payloads.recording_pass(3, 6, [22, 23], 5, routes[4:6]),  # the draft model's own
        payloads.recording_pass(4, 5, [23, 24, 25, 26], 6, routes[8:12]),  # what of it, no later pass tells
    ]
    (document,) = from_sglang_recorder(payloads.recording(passes), TARGET, "")
    check_document(document, GEOMETRY)
    assert document.tokens.tolist() == [*PROMPT, 21, 22, 99, 98, 23]
    assert document.accepted.tolist() == [True] * 6 + [False] * 2 + [True]
    assert document.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 5]
    assert document.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6]
    assert np.array_equal(document.routes, routes[:9])


def test_a_recording_holds_several_texts_chunks_and_ranks() -> None:
    a, b = make_routes(6, seed=1), make_routes(5, seed=2)
    passes = [
        payloads.recording_pass(1, 1, [1, 2, 3], 0, a[:3]),
        payloads.recording_pass(2, 1, [4, 5], 3, a[3:5]),  # a second chunk of the same prompt
        payloads.recording_pass(3, 2, [6], 5, a[5:6]),
        payloads.recording_pass(4, 1, [7, 8, 9, 10, 11], 2, b),  # the first two tokens were cached
    ]
    ranks = passes + [record | {"rank": 1} for record in passes]
    documents = list(from_sglang_recorder(payloads.recording(ranks), TARGET, ""))
    assert [d.tokens.tolist() for d in documents] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]] * 2
    assert documents[0].document_id == documents[2].document_id != documents[1].document_id
    assert documents[1].positions.tolist() == [2, 3, 4, 5, 6]
    both = np.concatenate([a[:3], b])
    lengths = {"extend_seq_lens": [3, 5], "positions": [0, 1, 2, 0, 1, 2, 3, 4]}
    packed = payloads.recording_pass(1, 1, [1, 2, 3, 7, 8, 9, 10, 11], 0, both, **lengths)
    documents = list(from_sglang_recorder(payloads.recording([packed]), TARGET, ""))
    assert [d.tokens.tolist() for d in documents] == [[1, 2, 3], [7, 8, 9, 10, 11]]
    assert np.array_equal(np.concatenate([d.routes for d in documents]), both)


def passes_with(**changes: Any) -> Any:
    return payloads.recording([payloads.recording_pass(1, 1, PROMPT, 0, ROUTES[:4]) | changes])


HUGE = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "has no records"),
        ({"records": [3]}, "has no records"),
        ({"records": [], "logical_count": torch.zeros(3)}, "no last_physical_to_logical_map"),
        (
            {"records": [], "last_physical_to_logical_map": HUGE.expand(1 << 15, 1 << 15)},
            "last_physical_to_logical_map",
        ),
        (passes_with(topk_ids_of_layer=None), "record in per_token mode"),
        (passes_with(topk_ids_of_layer=torch.zeros(3, 4, 8)), "dtype float32"),
        (passes_with(topk_ids_of_layer=torch.full((3, 4, 8), float("nan"))), "dtype float32"),
        (passes_with(topk_ids_of_layer=HUGE.expand(3, 4, 1 << 30)), "record in per_token mode"),
        (passes_with(topk_ids_of_layer=torch.full((3, 4, 2), 16, dtype=torch.int32)), "beyond the 16 of the map"),
        (passes_with(topk_ids_of_layer=torch.zeros((3, 4, 8), dtype=torch.int32)), "more than 2 experts"),
        (passes_with(input_ids=HUGE.expand(1 << 40)), "no input_ids"),
        (passes_with(positions=[0, 1]), "4 input_ids and 2 positions"),
        (passes_with(positions=[0, 1, 3, 4]), "do not follow one another"),
        (passes_with(extend_seq_lens=[1, 1]), "extend_seq_lens"),
        (passes_with(forward_mode=3), "forward_mode 3"),
        (passes_with(forward_mode=2), "one request at a time"),
        (passes_with(forward_pass_id=None), "forward_pass_id None"),
        (
            payloads.recording(
                [
                    payloads.recording_pass(1, 1, PROMPT, 0, ROUTES[:4]),
                    payloads.recording_pass(2, 5, [21, 22, 23], 4, ROUTES[:3], positions=[4, 5, 5]),
                ]
            ),
            "no chain",
        ),
        (
            payloads.recording(
                [
                    payloads.recording_pass(1, 1, PROMPT, 0, ROUTES[:4]),
                    payloads.recording_pass(2, 2, [21], 7, ROUTES[:1]),
                ]
            ),
            "one request at a time",
        ),
    ],
)
def test_a_recording_that_lies_or_cannot_be_understood_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(from_sglang_recorder(payload, TARGET, ""))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_a_recording_never_runs_code_and_is_never_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, write, message in (
        ("code", lambda path: torch.save({"records": [Evil()]}, path), "cannot be loaded safely|loaded safely"),
        ("bare pickle", lambda path: path.write_bytes(pickle.dumps(Evil())), "loaded safely"),
        ("bomb", lambda path: payloads.save_recording(path, payloads.recording(), zipfile.ZIP_DEFLATED), "compressed"),
        ("cut", lambda path: path.write_bytes(payloads.save_recording(path, payloads.recording()).read_bytes()[:-90]), "loaded"),
    ):  # fmt: skip
        path = tmp_path / name
        write(path)
        with pytest.raises(TraceError, match=message):
            load_recording(path)
    assert "executed" not in capsys.readouterr().out
    assert LAYERS == 3
