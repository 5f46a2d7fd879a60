"""An entry of the registry of predictor versions: what was published for a target, and where it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

MAX_BYTES = 65536
MAX_FIGURES = 256
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.:+-]{1,64}", re.ASCII)


class PredictorVersionError(ValueError):
    """An entry that breaks the format; the text is one sentence."""


@dataclass(frozen=True)
class PredictorVersion:
    """fingerprint: of the target that it was trained for; version: the name that the predictor tells its callers; location: a
    directory, as those see it who load it; digest: SHA-256 of the directory's files, in hexadecimal digits; figures: name ->
    number, such as accuracies; published_seconds: Unix time. Raises PredictorVersionError."""

    fingerprint: str
    version: str
    location: str
    digest: str
    figures: Mapping[str, float]
    published_seconds: float

    def __post_init__(self) -> None:
        for name, pattern in (("fingerprint", _FINGERPRINT), ("version", _NAME), ("digest", _DIGEST)):
            value = getattr(self, name)
            if not (isinstance(value, str) and pattern.fullmatch(value)):
                raise PredictorVersionError(
                    f"a predictor's {name} is {value!r:.80}; text of the form {pattern.pattern} is allowed."
                )
        if not (isinstance(self.location, str) and 0 < len(self.location) <= 4096 and self.location.isprintable()):
            raise PredictorVersionError(
                f"a predictor's location is {self.location!r:.80}; 1 to 4096 printable characters are allowed."
            )
        if not (isinstance(self.figures, Mapping) and len(self.figures) <= MAX_FIGURES):
            raise PredictorVersionError(f"a predictor's figures are no mapping of at most {MAX_FIGURES} numbers.")
        for name, value in (*self.figures.items(), ("published_seconds", self.published_seconds)):
            if not _NAME.fullmatch(name) or not _is_number(value):
                raise PredictorVersionError(f"a predictor's figure {name!r:.80} is {value!r:.80}; a number is needed.")

    def encode(self) -> bytes:
        """JSON. Raises PredictorVersionError when it becomes too large."""
        data = json.dumps({**asdict(self), "figures": dict(self.figures)}, sort_keys=True).encode()
        if len(data) > MAX_BYTES:
            raise PredictorVersionError(f"a predictor's entry has {len(data)} bytes; at most {MAX_BYTES} are allowed.")
        return data

    @classmethod
    def decode(cls, data: bytes) -> PredictorVersion:
        """Raises PredictorVersionError."""
        if len(data) > MAX_BYTES:
            raise PredictorVersionError(f"a predictor's entry has {len(data)} bytes; at most {MAX_BYTES} are allowed.")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            raise PredictorVersionError("a predictor's entry is no JSON; publish it again.") from None
        names = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise PredictorVersionError(f"a predictor's entry needs exactly the fields {', '.join(sorted(names))}.")
        return cls(**values)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 and math.isfinite(value)
    )
