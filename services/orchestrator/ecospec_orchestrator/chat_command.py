"""`ecospec-orchestrator chat`: talk to a server, with tokens per second, acceptance and experts per step as it answers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from .core import SettingsError

URL = "http://127.0.0.1:8000"


def add_parser(commands: Any) -> None:
    """commands: what argparse's add_subparsers() returned."""
    text = "talk to a server in the terminal, and watch its speed, acceptance and experts"
    parser = commands.add_parser("chat", help=text, description=text)
    parser.add_argument("--url", default=URL, help=f"address of the server (default {URL})")
    parser.add_argument("--model", help="the model's name (default: whatever is served)")
    parser.add_argument("--api-key-file", type=Path, help="a file with the API key and nothing else")
    parser.add_argument("--policy", help="none, likelihood, ecospec or goodput (default: the server's own)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer (default 512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 to 2 (default 0)")


def run(options: dict[str, Any]) -> int:
    """Exit code: 0, or 1 when the server does not answer or, without a terminal, refuses a question. Raises SettingsError."""
    # Not needed to serve, so not where every command imports it.
    from .chat import HELP, StatusLine, StatusRow, Talk, printable
    from .chat_client import ChatClient, ChatError

    key = read_key(options["api_key_file"])
    person = sys.stdin.isatty() and sys.stdout.isatty()
    limits = {name: options[name] for name in ("model", "policy", "max_tokens", "temperature")}
    try:
        with contextlib.closing(ChatClient(options["url"].rstrip("/"), key, **limits)) as client:
            facts = client.facts()
            status = StatusRow(sys.stdout) if person else StatusLine(sys.stderr)
            talk = Talk(client, status, sys.stdout, sys.stderr)
            if not person:
                return talk.answer_lines(sys.stdin)
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (line editing in input())
            print(printable(f"Talking to {facts.get('model') or 'a model that still loads'} at {client.url}. {HELP}"))
            talk.converse()
            return 0
    except ChatError as error:
        hint = " Give the key's file with --api-key-file." if error.status == 401 else ""
        print(printable(str(error)) + hint, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def read_key(path: Path | None) -> str:
    """Raises SettingsError."""
    if path is None:
        return ""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise SettingsError(f"Option --api-key-file is {path}, which cannot be read ({error}).") from error
    if len(words) != 1 or not words[0].isascii():
        raise SettingsError(
            f"Option --api-key-file is {path}, which holds {len(words)} words; the key alone is needed, in one line."
        )
    return words[0]
