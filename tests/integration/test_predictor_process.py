"""The predictor as a process: wrong settings, a taken port, a new version, a clean stop, also under load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from predictor_harness import check, random_tree, request
from predictor_server import predictor_process

from ecospec_proto import predictor_pb2, predictor_pb2_grpc

PREFIX = "ECOSPEC_PREDICTOR_SERVICE_"


def serve(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ecospec_predictor.cli", "serve", *options],
        env={**os.environ, **{PREFIX + name: value for name, value in variables.items()}},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "model").mkdir()
    (tmp_path / "table.gguf").write_bytes(b"nothing")
    return "--model-dir", str(tmp_path / "model"), "--embeddings", str(tmp_path / "table.gguf")


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--port", "99999"), {}, ("port", "'99999'", "1 to 65535")),
        ((), {"MAX_TREES": "many"}, ("max_trees", "'many'", "1 to 4096")),
        ((), {"MAX_TRES": "3"}, ("MAX_TRES", "max_trees")),
        (("--address", "nowhere"), {}, ("address", "'nowhere'", "host:port")),
        (("--grace-seconds", "nan"), {}, ("grace_seconds", "'nan'", "0 to 3600")),
        (("--model-dir", "missing"), {}, ("model_dir", "'missing'", "directory")),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    files: tuple[str, ...], options: tuple[str, ...], variables: dict[str, str], words: tuple[str, ...]
) -> None:
    ended = serve(*files, *options, **variables)
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def test_options_win_over_the_environment_and_a_taken_port_is_one_sentence(files: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve(*files, "--port", port, PORT="1")
        assert ended.returncode == 1 and f"127.0.0.1:{port}" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        ended = serve(*files, "--address", f"127.0.0.1:{port}")
        assert ended.returncode == 1 and f"127.0.0.1:{port}" in ended.stderr


def test_a_directory_without_a_model_is_one_sentence(files: tuple[str, ...]) -> None:
    ended = serve(*files, "--port", "0", "--metrics-port", "0")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "config.json" in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_line_when_ready_and_a_clean_stop(number: signal.Signals) -> None:
    with predictor_process() as (process, _):
        process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, rest, errors) == (0, "", "")


@pytest.fixture
def secured(tmp_path: Path) -> tuple[dict[str, Path], grpc.ChannelCredentials]:
    """The settings of mutual TLS, and what a caller needs."""
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("orchestrator")
    paths = {name: tmp_path / f"{name}.pem" for name in ("tls_certificate", "tls_key", "tls_client_ca")}
    for path, blob in zip(
        paths.values(), (server.cert_chain_pems[0], server.private_key_pem, authority.cert_pem), strict=True
    ):
        path.write_bytes(blob.bytes())
        path.chmod(0o600)
    pair = client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    return paths, grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *pair)


async def test_a_stop_under_load_answers_every_accepted_request_over_tls(
    secured: tuple[dict[str, Path], grpc.ChannelCredentials],
) -> None:
    generator = np.random.default_rng(0)
    trees = [random_tree(generator) for _ in range(4)]
    first = asyncio.Event()

    async def ask_all(stub: predictor_pb2_grpc.ExpertPredictorServiceStub) -> set[int]:
        stream, answered = stub.PredictStream(), set()
        for number, tree in enumerate(trees):
            await stream.write(predictor_pb2.PredictStreamRequest(request_id=number, request=request([tree])))
        while (answer := await stream.read()) is not grpc.aio.EOF:
            assert answer.WhichOneof("result") == "response", answer.error
            check(answer.response, [trees[answer.request_id]])
            answered.add(answer.request_id)
            first.set()
        assert await stream.code() == grpc.StatusCode.OK
        return answered

    files, credentials = secured
    # Eight batches of 0.2 s: when the first is answered, the others have been accepted and wait.
    with predictor_process(model_seconds=0.2, max_trees=4, **files) as (process, port):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            stub = predictor_pb2_grpc.ExpertPredictorServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask_all(stub)) for _ in range(8)]
                await first.wait()
                process.send_signal(signal.SIGTERM)
            assert [task.result() for task in tasks] == [set(range(len(trees)))] * 8
        rest, errors = await asyncio.to_thread(process.communicate)
        assert (process.returncode, rest, errors) == (0, "", "")


async def test_a_hangup_serves_the_new_version_and_the_process_lives_on(tmp_path: Path) -> None:
    for version in ("first", "second"):
        (tmp_path / version).mkdir()
    (tmp_path / "CURRENT").write_text("first\n")
    with predictor_process(model_dir=[tmp_path]) as (process, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = predictor_pb2_grpc.ExpertPredictorServiceStub(channel)

            async def version() -> str:
                return (await stub.GetModelInfo(predictor_pb2.GetModelInfoRequest())).model_version

            assert await version() == "first"
            (tmp_path / "fresh").write_text("second\n")
            os.replace(tmp_path / "fresh", tmp_path / "CURRENT")
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while await version() != "second":
                    await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
