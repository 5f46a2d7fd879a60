"""`ecospec-orchestrator key new NAME`, `key revoke NAME`, `key list`: the file of API keys from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .core import SettingsError
from .keys import KeyLimits, add_key, read_keys, remove_key

VARIABLE = "ECOSPEC_API_KEYS_FILE"


def add_parser(commands: Any) -> None:
    """commands: what argparse's add_subparsers() returned."""
    text = "make, revoke and list API keys; a running server sees the change at its next request"
    actions = commands.add_parser("key", help=text, description=text).add_subparsers(dest="action", required=True)
    for name, described in (
        ("new", "make a key and print it, once: the file keeps only its hash"),
        ("revoke", "take a key out of the file"),
        ("list", "names and limits in the file"),
    ):
        action = actions.add_parser(name, help=described, description=described)
        if name != "list":
            action.add_argument("name", help="letters, digits, '.', '_' and '-'; seen in logs and metrics")
        action.add_argument("--file", type=Path, help=f"the file of keys (default: variable {VARIABLE})")
        if name == "new":
            for limit in KeyLimits.model_fields:
                action.add_argument(
                    f"--{limit.replace('_', '-')}", type=int, dest=limit, help="default: the server's setting"
                )


def run(options: dict[str, Any]) -> int:
    """Raises SettingsError. The key alone goes to stdout, so that it can be piped to where it is kept."""
    path = options["file"] or Path(os.environ.get(VARIABLE, ""))
    if path == Path():
        raise SettingsError(f"No file of API keys is named; give --file FILE, or set {VARIABLE}.")
    if options["action"] == "new":
        print(add_key(path, options["name"], {limit: options[limit] for limit in KeyLimits.model_fields}))
        print(f"This is the only time that key '{options['name']}' is shown; {path} keeps its hash.", file=sys.stderr)
    elif options["action"] == "revoke":
        remove_key(path, options["name"])
        print(f"Key '{options['name']}' is revoked.", file=sys.stderr)
    else:
        for key in read_keys(path):
            limits = ", ".join(f"{name} {value}" for name, value in key.limits if value is not None)
            print(f"{key.name}: {limits or 'limits of the server'}")
    return 0
