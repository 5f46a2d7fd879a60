"""Refusals of the service, each with its gRPC status.

PredictorError          a start that failed; the text is one sentence
├── SettingsError       a wrong or unknown setting
└── AnotherTargetError  a version for another target than the one whose place it is in
Refused                 one request is not answered, for the reason in `code`
"""

from __future__ import annotations

import grpc


class PredictorError(Exception):
    """The service cannot start; the text is one sentence for a person."""


class SettingsError(PredictorError):
    """A wrong or unknown setting; the text is one sentence for a person."""


class AnotherTargetError(PredictorError):
    """A version that was trained for another target than the one whose place it is in; the text is one sentence."""


class Refused(Exception):
    """A request that gets no prediction. message goes to the caller: one sentence, nothing about the inside."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def number(self) -> int:
        """google.rpc.Code."""
        return self.code.value[0]

    @property
    def outcome(self) -> str:
        """Value of the metric label `outcome`."""
        return self.code.name.lower()
