"""`ecospec-orchestrator chat` against a live server: through pipes, and as a process of its own in a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_server import EchoScheduler, Running, serve, wait_until
from byte_engine import byte_scheduler
from scheduler_harness import build_policy

from ecospec_orchestrator.chat import printable
from ecospec_orchestrator.cli import main

CHAT = [sys.executable, "-m", "ecospec_orchestrator.cli", "chat"]
FIGURES = re.compile(r"\[\w+: \d+ tokens, [\d.]+ tokens/s, [\d.]+ tokens/step, [\d.]+ experts per layer and step\]")


def environment(**more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return own | {"PYTHONPATH": os.pathsep.join(sys.path)} | more


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def chat(*options: str, asks: str = "") -> Done:
    """The command in this process, with pipes instead of a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(asks))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        code = main(["chat", *options])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    scheduler = byte_scheduler("likelihood")
    scheduler.other_policies = {"none": build_policy("none")}
    with serve(byte_tokenizer, scheduler) as running:
        yield running


def test_every_line_of_a_pipe_is_a_question(server: Running) -> None:
    done = chat("--url", server.url, "--max-tokens", "20", asks="hello\n\nand more\n")
    assert done.returncode == 0, done.stderr
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0}
    first = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert done.stdout.startswith(re.sub(r"[^\n\t -~\u00a0-\U0010ffff]", "\ufffd", first) + "\n")
    assert len(FIGURES.findall(done.stderr)) == 2 and "likelihood: 20 tokens" in done.stderr


def test_the_policy_can_be_chosen(server: Running) -> None:
    done = chat("--url", server.url, "--max-tokens", "9", "--policy", "none", asks="hello\n")
    assert "none: 9 tokens" in done.stderr and " 1.00 tokens/step" in done.stderr


def test_a_server_that_tells_no_steps_is_talked_to_all_the_same(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler()) as server:
        done = chat("--url", server.url, "--max-tokens", "9", asks="hello\n")
        assert done.returncode == 0 and done.stdout.strip() and done.stderr == "[no steps told]\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:9"], r"No server answers at http://127\.0\.0\.1:9 \(.*\); start one with .*\.\n"),
        (["--url", "no address"], r"'no address' is no address.*\n"),
        (["--api-key-file", "/nowhere"], r"Option --api-key-file is /nowhere, which cannot be read .*\n"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: list[str], message: str) -> None:
    done = chat(*options)
    assert done.returncode in (1, 2) and re.fullmatch(message, done.stderr), done.stderr


def test_refusals_are_told_and_keys_are_read_from_a_file(byte_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-key\n")
    with serve(byte_tokenizer, byte_scheduler("likelihood"), api_keys="the-key") as server:
        without = chat("--url", server.url, asks="hello\n")
        assert without.returncode == 1 and "--api-key-file" in without.stderr and without.stderr.count("\n") == 1
        key = ["--url", server.url, "--api-key-file", str(tmp_path / "key")]
        assert chat(*key, "--max-tokens", "4", asks="hello\n").returncode == 0
        refused = chat(*key, "--max-tokens", "0", asks="hello\n")
        assert refused.returncode == 1 and "Field 'max_tokens' is 0" in refused.stderr


class Terminal:
    """The chat in a terminal of its own; screen: everything that it has written."""

    def __init__(self, *options: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CHAT, *options], stdin=slave, stdout=slave, stderr=slave, env=environment(LINES="12", COLUMNS="70"),
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 20) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline, self.screen
            ready, _, _ = select.select([self.master], [], [], 0.2)
            if ready:
                try:
                    self.screen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    time.sleep(0.05)
        self.screen = self.screen[found.end() :]
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_in_a_terminal_the_figures_are_live_and_ctrl_c_keeps_the_chat(byte_tokenizer: Any) -> None:
    scheduler = byte_scheduler("likelihood")
    verify = scheduler.engine.verify
    scheduler.engine.verify = lambda items: (time.sleep(0.03), verify(items))[1]  # type: ignore[method-assign]
    with serve(byte_tokenizer, scheduler) as server:
        terminal = Terminal("--url", server.url, "--max-tokens", "1500")
        try:
            terminal.wait_for(r"Talking to echo at http")
            terminal.wait_for(r"> ")
            terminal.type("hello\n")
            terminal.wait_for(r"\x1b\[1;11r")  # the last of twelve rows is kept free
            terminal.wait_for(r"\x1b\[12;1H\x1b\[2K\x1b\[2mlikelihood: \d+ tokens, [\d.]+ tokens/s")
            wait_until(lambda: scheduler.running == 1)
            os.killpg(terminal.process.pid, signal.SIGINT)
            terminal.wait_for(r"\x1b\[r")  # the whole terminal scrolls again
            terminal.wait_for(r"per layer and step, stopped\]")
            wait_until(lambda: scheduler.running == 0)
            terminal.wait_for(r"> ")
            terminal.type("/policy none\n")
            terminal.wait_for(r"Policy: none\.")
            terminal.type("/help\n")
            terminal.wait_for(r"Ctrl-C stops an answer")
            terminal.wait_for(
                r"> "
            )  # typed earlier, an end of input may be lost while the line editor takes the terminal
            terminal.type("\x04")
            assert terminal.process.wait(20) == 0
        finally:
            terminal.close()


def test_a_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td\u00e9\u6f22") == "a\ufffd[2Jb\ufffd\ufffdc\ufffd\n\td\u00e9\u6f22"
