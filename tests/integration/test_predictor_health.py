"""`python -m ecospec_predictor.health`, the predictor's probe, against a real predictor process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from predictor_server import predictor_process

PREFIX = "ECOSPEC_PREDICTOR_SERVICE_"


def health(*options: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ECOSPEC_")}
    return subprocess.run(
        [sys.executable, "-m", "ecospec_predictor.health", *options],
        env=environment | {PREFIX + name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=60,
    )


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Exit code, and lines on standard error."""
    assert done.stdout == ""
    return done.returncode, len(done.stderr.splitlines())


@pytest.mark.parametrize("options", [(), ("--live",)])
def test_a_serving_predictor_is_healthy(options: tuple[str, ...]) -> None:
    with predictor_process() as (_, port):
        assert told(health(*options, HOST="0.0.0.0", PORT=port)) == (0, 0)
    gone = health(*options, PORT=port)
    assert told(gone) == (1, 1) and "UNAVAILABLE" in gone.stderr


def test_over_mutual_tls_it_shows_the_servers_own_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("ecospec-predictor")
    files = {
        "tls_certificate": tmp_path / "tls.crt",
        "tls_key": tmp_path / "tls.key",
        "tls_client_ca": tmp_path / "ca.crt",
    }
    files["tls_certificate"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files["tls_key"].write_bytes(issued.private_key_pem.bytes())
    files["tls_key"].chmod(0o600)
    authority.cert_pem.write_to_path(str(files["tls_client_ca"]))
    variables = {name.upper(): path for name, path in files.items()}
    with predictor_process(**files) as (_, port):
        assert told(health("--server-name", "ecospec-predictor", PORT=port, **variables)) == (0, 0)
        assert told(health("--server-name", "another", PORT=port, **variables)) == (1, 1)
        assert told(health(PORT=port)) == (1, 1)  # plain text
        without = health(PORT=port, **{name: path for name, path in variables.items() if name != "TLS_CLIENT_CA"})
        assert told(without) == (2, 1) and "tls_client_ca" in without.stderr
        files["tls_client_ca"].unlink()
        assert told(health(PORT=port, **variables)) == (2, 1)


def test_a_wrong_setting_is_one_sentence() -> None:
    wrong = health(PORT="many")
    assert told(wrong) == (2, 1) and "'many'" in wrong.stderr
