"""What a JSON schema allows, said in a table's cell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def allowed(about: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A JSON schema in words. schemas: what a $ref may name."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return allowed(schemas[name], schemas) if "properties" not in schemas[name] else f"an object {name}"
    if "enum" in about or "const" in about:
        return ", ".join(f"`{json.dumps(value)}`" for value in about.get("enum", [about.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in about:
            kinds = [allowed(each, schemas) for each in about[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    kind = about.get("type", "anything")
    kind = "/".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        items = allowed(about.get("items", {}), schemas)
        many = re.sub(r"^(?:an? )?(\w+ number|\w+)", lambda found: f"{found[1]}s", items)
        return f"a list of {many}" + _bounds(about, "Items", "entries")
    if kind == "string":
        pattern = f" like `{about['pattern']}`" if "pattern" in about else ""
        return (
            ("a path" if about.get("format") == "path" else "text") + pattern + _bounds(about, "Length", "characters")
        )
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(about)
    return {"boolean": "true or false", "object": "an object"}.get(kind, kind)


def _range(about: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    found = [
        f"{word} {about[name]:g}" if isinstance(about[name], float) else f"{word} {about[name]}"
        for name, word in words.items()
        if name in about
    ]
    return f" ({', '.join(found)})" if found else ""


def _bounds(about: Mapping[str, Any], what: str, unit: str) -> str:
    least, most = about.get(f"min{what}"), about.get(f"max{what}")
    if most is not None:
        return f" ({least or 0} to {most} {unit})"
    return " (not empty)" if least == 1 else f" (at least {least} {unit})" if least else ""
