"""HTTPS: renewed files are used for new connections while open ones go on; what is wrong with them stops the start, not the server."""

from __future__ import annotations

import logging
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from server_process import ServerProcesses, health, read_line

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.settings import Settings
from ecospec_orchestrator.tls import HttpTls, http_tls


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerProcesses]:
    processes = ServerProcesses(tmp_path)
    yield processes
    processes.close()


class Files:
    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.issue()

    def issue(self) -> None:
        """A new certificate, renamed into place as a careful rotation does it."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        for path, data in ((self.key, issued.private_key_pem.bytes()), (self.certificate, chain)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.chmod(0o600)
            os.replace(fresh, path)

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def serial(client: httpx.Client, url: str) -> str:
    """Of the certificate that a new connection is shown."""
    with client.stream("GET", f"{url}/health") as answer:
        shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return shown["serialNumber"]


def test_a_renewed_certificate_is_used_at_once_and_an_open_stream_goes_on(start: ServerProcesses, files: Files) -> None:
    child, url = start(tls_certificate=files.certificate, tls_key=files.key)
    assert f"curl -N {url}/v1" in read_line(child)
    trust = files.trust()
    assert health(url, trust) == "ok"
    with httpx.Client(verify=trust, trust_env=False) as client:
        body = {"prompt": "abc", "max_tokens": 100, "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            with httpx.Client(verify=trust, trust_env=False) as other:
                before = serial(other, url)
            files.issue()
            with httpx.Client(verify=trust, trust_env=False) as other:
                after = serial(other, url)
            assert before != after
            files.key.write_text("no key")
            with httpx.Client(verify=trust, trust_env=False) as other:
                assert serial(other, url) == after, "the last good one stays in use"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/health", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health", trust_env=False)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    files.authority.configure_trust(old)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert health(url, old) == "ok"
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0


def test_a_bad_change_is_told_once(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tls = HttpTls(files.certificate, files.key)

    def handshake() -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = tls.context.wrap_bio(incoming, outgoing, server_side=True)
        client = files.trust().wrap_bio(outgoing, incoming, server_hostname="localhost")
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        assert client.getpeercert() is not None

    handshake()
    assert not caplog.records
    files.key.unlink()
    handshake()
    handshake()
    files.issue()
    handshake()
    handshake()
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and "cannot be used" in told[0] and "in use for new connections" in told[1]


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key"])
def test_half_a_configuration_is_refused(files: Files, missing: str) -> None:
    both = {"tls_certificate": files.certificate, "tls_key": files.key}
    with pytest.raises(SettingsError, match=f"{missing} is missing"):
        http_tls(Settings(**{name: path for name, path in both.items() if name != missing}))
    assert http_tls(Settings()) is None


def test_files_that_cannot_be_used_are_refused_before_anything_is_loaded(start: ServerProcesses, files: Files) -> None:
    stranger = trustme.CA().issue_cert("localhost")
    files.key.write_bytes(stranger.private_key_pem.bytes())
    child, _ = start(tls_certificate=files.certificate, tls_key=files.key, model="slow")
    assert "cannot be used" in read_line(child)
    assert child.wait(20) == 2
    files.key.unlink()
    with pytest.raises(SettingsError, match="cannot be used"):
        HttpTls(files.certificate, files.key)


def test_a_key_that_others_can_read_is_warned_of(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.key.chmod(0o440)  # as Kubernetes mounts a Secret for a group
    HttpTls(files.certificate, files.key)
    assert not caplog.records
    files.key.chmod(0o644)
    HttpTls(files.certificate, files.key)
    assert any("mode 644" in r.getMessage() for r in caplog.records)


def test_plain_text_that_leaves_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert http_tls(Settings(api_keys="a-key", host=host, admin_port=1, admin_host=host)) is None
    assert http_tls(Settings(host="0.0.0.0")) is None and not caplog.records
    assert http_tls(Settings(api_keys="a-key", host="0.0.0.0")) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "a-key" not in caplog.text
    with pytest.raises(SettingsError, match="admin_host is '0.0.0.0'"):
        http_tls(Settings(admin_port=1, admin_host="0.0.0.0"))
