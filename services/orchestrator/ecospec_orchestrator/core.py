"""The few nouns that every part of the orchestrator shares. Numpy only; no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ecospec_proto.trace_document import TraceDocument

ROOT = -1  # parent index of the first level of a draft tree: the root, the last token that is already decided


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one request, without the root. N nodes; parents come before children.

    tokens: int32 [N]; parents: int32 [N], ROOT or an earlier index; probabilities: float32 [N], product of the draft
    probabilities from the root to the node (the paper's P(t)), never larger than the parent's; depths: int32 [N], the
    first level is 1.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probabilities: np.ndarray
    depths: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def empty() -> DraftTree:
        none = np.zeros(0, np.int32)
        return DraftTree(none, none, np.zeros(0, np.float32), none)


@dataclass(frozen=True)
class Footprints:
    """Experts that the root and each node of one tree are predicted to use.

    experts: uint64 bitsets [1 + N, layers, words], row 0 is the root, bit e of word w is expert 64 * w + e;
    known: bool [1 + N], False where there is no prediction (to be charged, never free).
    """

    experts: np.ndarray
    known: np.ndarray


@dataclass(frozen=True)
class SamplingParams:
    """How the target decides the next token; the rules are verification.processing's and verification.sampling's.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filters off; seed None draws a fresh one. presence_penalty
    and frequency_penalty look at the output so far, repetition_penalty at the prompt, too; logit_bias: (token, what is added to
    its logit), each token once; min_tokens: no stop token comes before that many output tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0


class GrammarState(Protocol):
    """Where one text stands in a grammar: a function of the tokens that it was advanced by, and of nothing else."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, for a person; None as long as it can. It stays."""
        ...

    def allowed(self) -> np.ndarray:
        """bool [tokens that the grammar knows], at least one True: what may come next, with the tokens that end an answer where
        the text may end here. All True after an error."""
        ...

    def advance(self, token: int) -> None:
        """The text goes on with an allowed token that does not end it. Raises nothing: see error."""
        ...


class Grammar(Protocol):
    """What an answer must look like."""

    def start(self) -> GrammarState:
        """The state of an empty text."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to continue. stop_token_ids end it (the stop token is not emitted); logprobs: None or the number of
    alternatives reported per token (0: the chosen token only); prompt_logprobs: the same for the tokens of the prompt;
    record_routes: the last event brings the experts used; grammar: what the output must look like, whose ends are among
    stop_token_ids; span: of the HTTP request, where it is traced; policy: a wish, see wishes.policy_of_step(); step_events: every event
    brings its step."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    record_routes: bool = False
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    span: Any = field(default=None, compare=False, repr=False)
    policy: str | None = None
    step_events: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability under the target's unmodified distribution; alternatives best first; rank: 1 for the most
    probable token."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass
class RequestStats:
    """What one request cost; filled by the scheduler. Times are seconds; bytes are read in steps that it took part in,
    divided by the number of requests in the step."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0  # decode steps, speculated or not
    steps_not_speculated: int = 0
    draft_tokens: int = 0  # nodes sent to verification
    accepted_tokens: int = 0  # of those, accepted
    acceptance_histogram: dict[int, int] = field(default_factory=dict)  # accepted per step -> steps
    acceptance_histogram_by_draft_length: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # nodes sent -> accepted -> steps
    distinct_experts_sum: float = 0.0  # sum over steps of the mean over layers of distinct experts of the whole step
    bytes_read: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class TokenEvent:
    """What the scheduler tells the owner of a request after a step. finish_reason: None, "stop", "length", "abort" or
    "error"; stats comes with the last event, and so do, for a request that asked for them, its routes: rows in the order in
    which they were computed, those of the last output token, which was not, unknown. prompt_logprobs comes once, before the first
    token, for a request that asked for it: one entry per prompt token but the first. step: the decode step that brought the tokens, for
    a request that asked for it."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stats: RequestStats | None = None
    error: str | None = None
    routes: TraceDocument | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    step: StepEvent | None = None


@dataclass(frozen=True)
class BytesRead:
    """Bytes read by one step, by component."""

    experts: int = 0
    attention: int = 0
    shared: int = 0
    head: int = 0
    kv: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        return self.experts + self.attention + self.shared + self.head + self.kv + self.draft


@dataclass(frozen=True)
class Decision:
    """Why a step did what it did, and what the policy expected of it.

    not_speculated: None when draft nodes were verified, else why not: "policy" (it never does), "drafting_does_not_pay",
    "no_node_pays", "nothing_drafted". probe: drafted to look, although recent steps say that it does not pay.
    prediction: "asked", "does_not_pay", "cannot_matter" or "off". expected_tokens: all requests, bonus tokens included;
    expected_seconds: the whole step; plain_seconds: the same step without drafts; None without an estimate. fallback_policy: who
    decided instead, for want of a profile.
    """

    policy: str
    not_speculated: str | None
    probe: bool = False
    prediction: str = "off"
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    fallback_policy: str | None = None
    plain_seconds: float | None = None


@dataclass(frozen=True)
class PredictedFootprint:
    """What was predicted for the rows of one step that had a prediction, against what they used.

    rows: such rows, roots included; nodes: int64 [3, layers], (node, expert) pairs over the draft nodes among them: predicted,
    used, both; union_predicted, union_actual: int64 [layers], distinct experts of all of them together.
    """

    rows: int
    nodes: np.ndarray
    union_predicted: np.ndarray
    union_actual: np.ndarray

    @property
    def node_totals(self) -> tuple[int, int, int]:
        predicted, used, both = self.nodes.sum(axis=1).tolist()
        return predicted, used, both


@dataclass(frozen=True)
class StepReport:
    """One decode step, measured. All arrays are numpy."""

    requests: int
    nodes: int  # draft nodes verified, all requests together
    speculated: bool
    accepted: tuple[int, ...]  # accepted draft tokens per request
    sent: tuple[int, ...]  # draft nodes verified per request
    emitted: int  # tokens produced, all requests together
    distinct_experts: np.ndarray  # int [layers], union over all rows of the step
    bytes_read: BytesRead
    bytes_upper_bound: int  # as if no two rows shared an expert
    bytes_autoregressive: float  # expected bytes for `emitted` tokens decoded one per step and request
    predicted_actual_overlap: (
        tuple[int, int, int] | None
    )  # (predicted, actual, both) over verified nodes with known experts
    draft_seconds: float
    predict_seconds: float
    select_seconds: float
    verify_seconds: float
    step_seconds: float
    fallback: str | None = (
        None  # why the step went on without predictions: "unavailable", "deadline", "mismatch", "error"
    )
    decision: Decision | None = None
    footprint: PredictedFootprint | None = None  # None without a prediction


@dataclass(frozen=True)
class StepEvent:
    """One decode step as one of its requests sees it; N candidates.

    index: among the request's decode steps, from 0; root: the token that the step starts from; tree: all that was drafted for this
    request; chosen, accepted: bool [N], verified, and kept; target_probabilities: float64 [N], what the target gives each token after
    its parent (1 or 0 at temperature 0), NaN where it was not asked; plain_experts: int64 [layers], distinct experts that a plain step
    of the same requests reads; not_speculated: why nothing of this request was verified, as in Decision, or "request": it asked for
    plain decoding; report: the whole step, all its requests together.
    """

    index: int
    root: int
    tree: DraftTree
    chosen: np.ndarray
    accepted: np.ndarray
    target_probabilities: np.ndarray
    plain_experts: np.ndarray
    not_speculated: str | None
    report: StepReport


class EcoSpecError(Exception):
    """EcoSpecError
    |- InvalidRequestError    the request itself is wrong (HTTP 400)
    |- QueueFullError         too many requests wait (HTTP 429)
    |- ShuttingDownError      no new work is taken (HTTP 503)
    |- SettingsError          a setting stops the start
    |- ProfileError           measured costs that cannot be had or used (selection.cost)
    """


class InvalidRequestError(EcoSpecError):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(EcoSpecError):
    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDownError(EcoSpecError):
    pass


class SettingsError(EcoSpecError):
    pass
