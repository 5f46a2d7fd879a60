"""The predictor over TLS: who gets in, and certificates that change while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from predictor_harness import SERVICE_NAME, check, request, running, settings

from ecospec_predictor.errors import SettingsError
from ecospec_predictor.server import PredictorServer
from ecospec_predictor.tls import server_tls
from ecospec_proto import predictor_pb2, predictor_pb2_grpc

TREE = ([1, 2, 3], [4, 5], [-1, 0])
Stub = predictor_pb2_grpc.ExpertPredictorServiceStub


class Files:
    """An authority, and what it signed for the server, in files."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self.certificate, self.key, self.ca = folder / "server.pem", folder / "server.key", folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.issue(authority)

    def issue(self, authority: trustme.CA) -> bytes:
        """A new certificate, renamed into place as a careful rotation does it."""
        issued = authority.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        for path, data in ((self.key, issued.private_key_pem.bytes()), (self.certificate, chain)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.chmod(0o600)
            os.replace(fresh, path)
        return chain

    @property
    def mutual(self) -> dict[str, Path]:
        return {"tls_certificate": self.certificate, "tls_key": self.key, "tls_client_ca": self.ca}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    return Files(tmp_path, authority)


def caller(server: PredictorServer, roots: trustme.CA | None, signed_by: trustme.CA | None = None) -> grpc.aio.Channel:
    """A channel that trusts `roots` (None: plain text) and presents a certificate of `signed_by`."""
    where, options = f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]
    if roots is None:
        return grpc.aio.insecure_channel(where, options=options)
    own: dict[str, bytes] = {}
    if signed_by is not None:
        issued = signed_by.issue_cert("orchestrator")
        own = {"private_key": issued.private_key_pem.bytes(), "certificate_chain": issued.cert_chain_pems[0].bytes()}
    return grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(roots.cert_pem.bytes(), **own), options=options)


async def test_a_caller_with_a_certificate_is_answered_and_health_is_too(files: Files, authority: trustme.CA) -> None:
    async with running(**files.mutual) as server, caller(server, authority, authority) as channel:
        check(await Stub(channel).Predict(request([TREE])), [TREE])
        asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_a_client_authority_no_certificate_is_needed(files: Files, authority: trustme.CA) -> None:
    only_server = {name: path for name, path in files.mutual.items() if name != "tls_client_ca"}
    async with running(**only_server) as server, caller(server, authority) as channel:
        check(await Stub(channel).Predict(request([TREE])), [TREE])


@pytest.mark.parametrize("who", ["no certificate", "another authority's", "distrusts the server", "plain text"])
async def test_everyone_else_is_refused(files: Files, authority: trustme.CA, who: str) -> None:
    other = trustme.CA()
    trusted, signed_by = {
        "no certificate": (authority, None),
        "another authority's": (authority, other),
        "distrusts the server": (other, authority),
        "plain text": (None, None),
    }[who]
    async with running(**files.mutual) as server:
        async with caller(server, trusted, signed_by) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Stub(channel).Predict(request([TREE]), timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with caller(server, authority, authority) as channel:  # the others are served on
            check(await Stub(channel).Predict(request([TREE])), [TREE])


async def shown(server: PredictorServer) -> bytes:
    """The certificate that a new connection sees."""
    return await asyncio.to_thread(lambda: ssl.get_server_certificate(("127.0.0.1", server.port)).encode())


async def test_a_new_certificate_is_used_at_once_and_a_live_stream_goes_on(
    files: Files, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ecospec_predictor.tls")
    only_server = {name: path for name, path in files.mutual.items() if name != "tls_client_ca"}

    async def ask(stream: Any, number: int) -> None:
        await stream.write(predictor_pb2.PredictStreamRequest(request_id=number, request=request([TREE])))
        answer = await stream.read()
        assert answer.request_id == number
        check(answer.response, [TREE])

    async with running(**only_server) as server, caller(server, authority) as channel:
        first = await shown(server)
        stream = Stub(channel).PredictStream()
        await ask(stream, 1)
        new = files.issue(authority)
        assert await shown(server) == new.replace(b"\r", b"") != first
        await ask(stream, 2)

        files.key.write_bytes(b"half a key")  # a rotation that went wrong keeps the certificate that works
        assert await shown(server) == await shown(server) == new
        assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
        files.key.unlink()
        assert await shown(server) == await shown(server) == new
        assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "WARNING"]
        await ask(stream, 3)
        newest = files.issue(authority)
        assert await shown(server) == newest
        await ask(stream, 4)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_callers_of_a_new_authority_are_let_in_once_its_file_names_it(
    files: Files, authority: trustme.CA
) -> None:
    other = trustme.CA()
    async with running(**files.mutual) as server:
        files.ca.write_bytes(other.cert_pem.bytes())
        async with caller(server, authority, other) as channel:
            check(await Stub(channel).Predict(request([TREE])), [TREE])
        async with caller(server, authority, authority) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await Stub(channel).Predict(request([TREE]), timeout=10)


def test_a_key_that_others_can_read_is_warned_of(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    tls = server_tls(settings(**files.mutual))
    assert tls is not None
    tls.credentials()
    assert not caplog.records
    files.key.chmod(0o440)  # as Kubernetes mounts a Secret for a group
    tls.credentials()
    assert not caplog.records
    files.key.chmod(0o644)
    tls.credentials()
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "644" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "0.0.0.0"}, ("host", "'0.0.0.0'", "allow_plaintext")),
        ({"host": "predictor.example"}, ("host", "plain text")),
        ({"tls_key": "x"}, ("tls_certificate", "missing")),
        ({"tls_client_ca": "x"}, ("tls_certificate", "missing")),
        ({"tls_certificate": "x"}, ("tls_key", "missing")),
        ({"tls_certificate": "none.pem", "tls_key": "none.key"}, ("none.pem", "cannot be used")),
    ],
)
def test_plain_text_to_other_machines_and_half_a_configuration_are_refused(
    changes: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        server_tls(settings(**changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"host": "localhost"}, {"host": "::1"}, {"host": "0.0.0.0", "allow_plaintext": True}]
)
def test_plain_text_stays_on_this_machine_unless_asked_for(changes: dict[str, Any]) -> None:
    assert server_tls(settings(**changes)) is None


def test_a_key_of_another_certificate_is_refused(files: Files) -> None:
    files.key.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    with pytest.raises(SettingsError, match=r"server\.key"):
        server_tls(settings(**files.mutual))
