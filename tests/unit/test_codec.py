"""The wire codec: round trips, hostile bytes, and bitsets against sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_proto.codec import CodecError, decode_experts, decode_tree, encode_experts, encode_tree, pack_bitsets

INT32 = st.integers(-(2**31), 2**31 - 1)


def members(bits: np.ndarray) -> list[list[set[int]]]:
    """uint64 [n, layers, words] -> the sets, read bit by bit."""
    return [
        [
            {64 * word + bit for word, value in enumerate(row) for bit in range(64) if int(value) >> bit & 1}
            for row in node
        ]
        for node in bits
    ]


@pytest.mark.parametrize(
    ("nodes", "layers", "experts", "k", "dtype"),
    [
        (60, 94, 128, 8, np.uint8),  # Qwen3-235B
        (7, 5, 300, 8, np.uint16),
        (1, 1, 1, 1, np.uint8),
        (3, 2, 64, 64, np.uint8),
        (3, 2, 65, 3, np.uint8),
        (4, 3, 256, 4, np.uint8),
        (2, 2, 65536, 5, np.uint16),
        (0, 4, 32, 4, np.uint8),
    ],
)
def test_experts_survive_the_wire_and_become_the_right_sets(
    nodes: int, layers: int, experts: int, k: int, dtype: type
) -> None:
    generator = np.random.default_rng(nodes + experts)
    ids = generator.random((nodes, layers, experts)).argsort(axis=-1)[..., :k].astype(dtype)
    data, number = encode_experts(ids)
    assert len(data) == nodes * layers * k * np.dtype(dtype).itemsize and number == np.dtype(dtype).itemsize
    back = decode_experts(data, number, nodes, layers, k)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, ids)
    bits = pack_bitsets(back, experts)
    assert bits.dtype == np.uint64 and bits.shape == (nodes, layers, -(-experts // 64))
    assert members(bits) == [[set(map(int, row)) for row in node] for node in ids]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_packing_is_a_set_for_any_integer_dtype(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 200))
    shape = data.draw(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 5)))
    dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.uint64, np.int16]))
    values = data.draw(
        st.lists(st.integers(0, experts - 1), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    )
    ids = np.array(values, dtype).reshape(shape)  # repeats included
    assert members(pack_bitsets(ids, experts)) == [[set(map(int, row)) for row in node] for node in ids]
    if ids.size:
        at = data.draw(st.integers(0, ids.size - 1))
        wrong = ids.astype(np.int64)
        wrong.flat[at] = data.draw(st.sampled_from([-1, experts, experts + 64, 10**6, -(2**40)]))
        with pytest.raises(CodecError, match=f"id {wrong.flat[at]}.*0 to {experts - 1}"):
            pack_bitsets(wrong, experts)


def test_strided_views_pack_like_copies() -> None:
    ids = np.random.default_rng(5).integers(0, 50, (6, 4, 8), dtype=np.uint8)[::2, :, ::2]
    np.testing.assert_array_equal(pack_bitsets(ids, 50), pack_bitsets(ids.copy(), 50))


def test_bytes_are_little_endian_whatever_the_array_was() -> None:
    assert encode_experts(np.array([[[0x0102]]], ">u2")) == (b"\x02\x01", 2)
    assert encode_experts(np.array([[[0x0102]]], "<u2")) == (b"\x02\x01", 2)
    assert encode_tree([1], np.array([2], ">i8"), np.array([-1]))[1:] == (b"\x02\0\0\0", b"\xff\xff\xff\xff")
    assert decode_experts(b"\x02\x01", 2, 1, 1, 1)[0, 0, 0] == 0x0102


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_trees_survive_the_wire(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 1000, 2**31 - 1]))
    token = st.integers(0, vocabulary - 1)
    context = data.draw(st.lists(token, min_size=1, max_size=20))
    tokens = data.draw(st.lists(token, max_size=20))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    tail = data.draw(st.one_of(st.none(), st.integers(1, 25)))
    fields = encode_tree(context, np.array(tokens, np.int64), np.array(parents, np.int32))
    back = decode_tree(*fields, vocabulary, 20, tail)
    assert [array.tolist() for array in back] == [context if tail is None else context[-tail:], tokens, parents]
    assert all(array.dtype == np.int64 for array in back)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=64), st.integers(-3, 300), st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_any_bytes_decode_to_exactly_those_experts_or_are_refused(
    data: bytes, dtype: int, nodes: int, layers: int, k: int
) -> None:
    fits = dtype in (1, 2) and len(data) == nodes * layers * k * dtype
    try:
        experts = decode_experts(data, dtype, nodes, layers, k)
    except CodecError as error:
        assert not fits and sentence(error)
        return
    assert fits and experts.shape == (nodes, layers, k)
    assert encode_experts(experts) == (data, dtype)


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=40), st.lists(st.integers(-2, 12), max_size=8).map(lambda v: np.array(v, "<i4").tobytes())
    ),
    st.one_of(
        st.binary(max_size=40), st.lists(st.integers(-2, 12), max_size=8).map(lambda v: np.array(v, "<i4").tobytes())
    ),
    st.one_of(
        st.binary(max_size=40), st.lists(st.integers(-2, 6), max_size=8).map(lambda v: np.array(v, "<i4").tobytes())
    ),
)
def test_any_bytes_decode_to_a_valid_tree_or_are_refused(context: bytes, tokens: bytes, parents: bytes) -> None:
    valid = all(len(field) % 4 == 0 for field in (context, tokens, parents))
    if valid:
        ids, drafts, above = (
            [int.from_bytes(f[i : i + 4], "little", signed=True) for i in range(0, len(f), 4)]
            for f in (context, tokens, parents)
        )
        valid = (
            len(ids) >= 1
            and len(drafts) <= 6
            and len(above) == len(drafts)
            and all(0 <= value < 10 for value in [*ids, *drafts])
            and all(-1 <= p < node for node, p in enumerate(above))
        )
    try:
        tree = decode_tree(context, tokens, parents, 10, 6)
    except CodecError as error:
        assert not valid and sentence(error)
        return
    assert valid and encode_tree(*tree) == (context, tokens, parents)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(INT32, st.integers(-(2**40), 2**40)), max_size=6))
def test_encoding_never_wraps_a_number(values: list[int]) -> None:
    array = np.array(values, np.int64)
    try:
        data = encode_tree(array, np.zeros(0, np.int32), np.zeros(0, np.int32))[0]
    except CodecError:
        assert any(not -(2**31) <= value < 2**31 for value in values)
        return
    assert [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)] == values


def sentence(error: CodecError) -> bool:
    return str(error).endswith(".") and "\n" not in str(error)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decode_tree(b"", b"", b"", 10, 4), ["context_tokens", "empty"]),
        (lambda: decode_tree(b"\1", b"", b"", 10, 4), ["context_tokens", "1 bytes", "multiple of 4"]),
        (lambda: decode_tree(int32(1), b"\1\2", b"", 10, 4), ["draft_tokens", "2 bytes"]),
        (lambda: decode_tree(int32(1), b"", b"\1\2\3", 10, 4), ["parents", "3 bytes"]),
        (lambda: decode_tree(int32(1), int32(*range(5)), b"", 10, 4), ["draft_tokens", "5 nodes", "at most 4"]),
        (lambda: decode_tree(int32(1), int32(1, 2), int32(-1), 10, 4), ["parents", "1 entries", "2 draft_tokens"]),
        (lambda: decode_tree(int32(1), int32(1, 2), int32(-1, 1), 10, 4), ["parents[1] is 1", "earlier node"]),
        (lambda: decode_tree(int32(1), int32(1, 2), int32(1, 0), 10, 4), ["parents[0] is 1"]),
        (lambda: decode_tree(int32(1), int32(1), int32(-2), 10, 4), ["parents[0] is -2"]),
        (lambda: decode_tree(int32(1, -1), b"", b"", 10, 4), ["context_tokens[1] is -1", "0 to 9"]),
        (lambda: decode_tree(int32(10, 1), b"", b"", 10, 4, 1), ["context_tokens[0] is 10"]),  # outside the tail
        (lambda: decode_tree(int32(1), int32(10), int32(-1), 10, 4), ["draft_tokens[0] is 10", "0 to 9"]),
        (lambda: decode_experts(b"\0" * 7, 1, 2, 2, 2), ["7 bytes", "need 8", "uint8"]),
        (lambda: decode_experts(b"\0" * 8, 2, 2, 2, 2), ["8 bytes", "need 16", "uint16"]),
        (lambda: decode_experts(b"", 0, 0, 1, 1), ["dtype is 0", "uint8", "uint16"]),
        (lambda: encode_experts(np.zeros((1, 1, 1), np.int64)), ["int64", "uint8 or uint16"]),
        (lambda: encode_tree([0.5], np.zeros(0, np.int32), np.zeros(0, np.int32)), ["float64", "int32"]),
        (lambda: pack_bitsets(np.full((1, 1, 1), 200, np.uint8), 128), ["id 200", "0 to 127"]),
        (lambda: pack_bitsets(np.zeros((1, 1), np.uint8), 128), ["shape (1, 1)"]),
        (lambda: pack_bitsets(np.zeros((1, 1, 1), np.float32), 128), ["float32"]),
        (lambda: pack_bitsets(np.zeros((1, 1, 1), np.uint8), 0), ["experts is 0", "65536"]),
    ],
)
def test_refusals_name_what_is_wrong_and_what_is_allowed(call, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CodecError) as caught:
        call()
    assert sentence(caught.value)
    for word in words:
        assert word in str(caught.value)
