"""Addresses of the state store, which must not tell secrets, and entries of the version registry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_proto.predictor_version import MAX_BYTES, PredictorVersion, PredictorVersionError
from ecospec_proto.shared_state import StoreAddress

VERSION = PredictorVersion("0" * 32, "2026-11.1", "/models/p", "a" * 64, {"top_k_accuracy": 0.875}, 1.75e9)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", ("cache", 6379, 0, False, None, None, None)),
        ("redis://10.0.0.1:7000/3", ("10.0.0.1", 7000, 3, False, None, None, None)),
        ("redis://:s%40cret@cache:1/", ("cache", 1, 0, False, None, None, "s@cret")),
        ("rediss://me:hush@[::1]:6380/1", ("::1", 6380, 1, True, None, "me", "hush")),
        ("rediss://cache?ssl_ca_certs=%2Fca.pem", ("cache", 6379, 0, True, "/ca.pem", None, None)),
    ],
)
def test_an_address_is_read(url: str, expected: tuple[Any, ...]) -> None:
    a = StoreAddress.parse(url)
    assert (a.host, a.port, a.database, a.tls, a.ca_file, a.user, a.password) == expected


def test_a_password_of_its_own_wins_and_none_is_shown() -> None:
    a = StoreAddress.parse("rediss://me:hush@cache:6380/2", "quiet")
    assert a.password == "quiet" and str(a) == "rediss://cache:6380/2"
    assert "hush" not in repr(a) and "quiet" not in repr(a) and "me" not in repr(a).replace("name", "")
    assert str(StoreAddress.parse("redis://[::1]")) == "redis://[::1]:6379/0"


@pytest.mark.parametrize(
    "url",
    [
        "http://x:hush@cache",
        "cache:6379",
        "redis://",
        "redis://:hush@:1",
        "redis://cache:hush",
        "redis://cache:99999/0",
        "redis://cache/first",
        "redis://cache/123456",
        "redis://cache?ssl_cert_reqs=none",
        "rediss://cache?ssl_cert_reqs=none&x=hush",
        "rediss://cache?ssl_ca_certs=",
        "redis://cache?ssl_ca_certs=ca.pem",
        "redis://cache#hush",
        "redis://[hush",
    ],
)
def test_another_address_is_refused_without_telling_it(url: str) -> None:
    with pytest.raises(ValueError, match="redis://host:6379/0") as caught:
        StoreAddress.parse(url)
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_entry_comes_back_as_it_went() -> None:
    assert PredictorVersion.decode(VERSION.encode()) == VERSION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fingerprint", "xyz"),
        ("fingerprint", 3),
        ("version", ""),
        ("version", "a b"),
        ("version", "v" * 65),
        ("location", ""),
        ("location", "a\nb"),
        ("digest", "0" * 63),
        ("figures", [1]),
        ("figures", {"accuracy": "high"}),
        ("figures", {"accuracy": True}),
        ("figures", {"accuracy": float("nan")}),
        ("figures", {"a b": 1.0}),
        ("figures", {str(i): i for i in range(300)}),
        ("published_seconds", float("inf")),
        ("published_seconds", None),
    ],
)
def test_a_broken_entry_is_refused_on_both_sides(name: str, value: Any) -> None:
    values = {**vars(VERSION), name: value}
    for make in (lambda: PredictorVersion(**values), lambda: PredictorVersion.decode(json.dumps(values).encode())):
        with pytest.raises(PredictorVersionError) as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"version": "1"}', b"[" * 50_000, b" " * (MAX_BYTES + 1), b"\xff"]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PredictorVersionError):
        PredictorVersion.decode(data)


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(PredictorVersionError):
        PredictorVersion.decode(data)
