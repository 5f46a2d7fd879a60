"""The orchestrator's client over TLS, against the real predictor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import trustme
from predictor_harness import GEOMETRY, fake, running

from ecospec_orchestrator.core import DraftTree, SettingsError
from ecospec_orchestrator.footprint import stream
from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext
from ecospec_orchestrator.footprint.channel import ClientTls, client_tls
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_orchestrator.predictor_process import is_serving, predictor_command
from ecospec_orchestrator.settings import load_settings
from ecospec_predictor.server import PredictorServer
from ecospec_proto.codec import pack_bitsets

TREE = TreeContext([1, 2, 3], DraftTree(np.array([4]), np.array([-1]), np.ones(1), np.ones(1)))
EXPERTS = pack_bitsets(fake.tree_experts([1, 2, 3], [4], [-1], GEOMETRY), GEOMETRY.experts)


class Pair:
    """The files of one authority's predictor and orchestrator in a folder; issue() writes them, again where they are."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.folder = folder / "ca.pem", folder
        self.issue(trustme.CA())

    def issue(self, authority: trustme.CA) -> None:
        authority.cert_pem.write_to_path(str(self.ca))
        for name, host in (("server", "127.0.0.1"), ("client", "orchestrator")):
            issued = authority.issue_cert(host)
            issued.private_key_pem.write_to_path(str(self.folder / f"{name}.key"))
            issued.cert_chain_pems[0].write_to_path(str(self.folder / f"{name}.pem"))
            (self.folder / f"{name}.key").chmod(0o600)

    @property
    def server(self) -> dict[str, Path]:
        return {
            "tls_certificate": self.folder / "server.pem",
            "tls_key": self.folder / "server.key",
            "tls_client_ca": self.ca,
        }

    @property
    def client(self) -> ClientTls:
        return ClientTls(self.ca, self.folder / "client.pem", self.folder / "client.key")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def source_of(server: PredictorServer, tls: ClientTls | None) -> RemoteFootprintSource:
    return RemoteFootprintSource(f"127.0.0.1:{server.port}", GEOMETRY, 5.0, tls=tls)


async def until_answered(source: RemoteFootprintSource) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                (found,) = await asyncio.to_thread(lambda: source.begin([TREE])())
                return np.testing.assert_array_equal(found.experts, EXPERTS)
            except FootprintUnavailableError as error:
                assert error.reason == "unavailable"
                await asyncio.sleep(0.02)


async def test_predictions_come_over_mutual_tls_and_health_too(pair: Pair) -> None:
    async with running(**pair.server) as server:
        source = source_of(server, pair.client)
        try:
            await until_answered(source)
            address = f"127.0.0.1:{server.port}"
            assert await asyncio.to_thread(is_serving, address, pair.client)
            assert not await asyncio.to_thread(is_serving, address)
        finally:
            source.close()


@pytest.mark.parametrize("stranger", ["no certificate", "plain text", "another authority"])
async def test_a_stranger_gets_no_predictions(
    pair: Pair, stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CONNECT_SECONDS", 0.5)
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    tls = {"no certificate": ClientTls(pair.ca), "plain text": None, "another authority": ClientTls(other)}[stranger]
    async with running(**pair.server) as server:
        source = source_of(server, tls)
        try:
            message = ""
            async with asyncio.timeout(10):
                while "cannot be reached" not in message:  # it tried
                    await asyncio.sleep(0.02)
                    with pytest.raises(FootprintUnavailableError) as caught:
                        source.begin([TREE])
                    message = str(caught.value)
            assert stranger != "another authority" or "CERTIFICATE_VERIFY_FAILED" in message
            assert caught.value.reason == "unavailable"
        finally:
            source.close()


async def test_renewed_files_are_read_at_the_next_connection(pair: Pair) -> None:
    async with running(**pair.server) as server:
        port = server.port
        source = source_of(server, pair.client)
        try:
            await until_answered(source)
            await server.stop()
            pair.issue(trustme.CA())  # everything new, of a new authority
            async with running(**pair.server, port=port):
                await until_answered(source)
        finally:
            source.close()


def test_half_a_configuration_is_refused(pair: Pair) -> None:
    at = {"ca": pair.ca, "certificate": pair.folder / "client.pem", "key": pair.folder / "client.key"}

    def tls_of(*names: str) -> ClientTls | None:
        return client_tls(load_settings({f"predictor_tls_{name}": at[name] for name in names}, {}))

    assert tls_of() is None
    assert tls_of("ca") == ClientTls(pair.ca)
    assert tls_of("ca", "certificate", "key") == pair.client
    for given, missing in (
        (("ca", "key"), "certificate"),
        (("ca", "certificate"), "key"),
        (("certificate", "key"), "ca"),
    ):
        with pytest.raises(SettingsError, match=f"predictor_tls_{missing} is missing"):
            tls_of(*given)
    at["key"].write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    with pytest.raises(SettingsError, match=r"client\.key.*cannot be used"):
        tls_of("ca", "certificate", "key")
    pair.ca.write_text("nothing")
    with pytest.raises(SettingsError, match=r"ca\.pem.*cannot be used"):
        tls_of("ca")


def test_a_key_that_others_can_read_is_warned_of(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(
        {f"predictor_tls_{name}": getattr(pair.client, name) for name in ("ca", "certificate", "key")}, {}
    )
    client_tls(settings)
    assert not caplog.records
    (pair.folder / "client.key").chmod(0o604)
    client_tls(settings)
    assert "604" in caplog.text


def test_the_demos_own_predictor_is_reached_in_plain_text(pair: Pair) -> None:
    with pytest.raises(SettingsError, match="predictor_tls_ca"):
        predictor_command(load_settings({"predictor_tls_ca": pair.ca}, {}), Path("weights.gguf"))
