"""Is the predictor worth its wait? Learned by the number of requests in the batch."""

from __future__ import annotations

from .goodput_state import KIND_STEPS
from .means import Mean, nearest

ASK_TRIALS = 2  # answers before the worth of asking is judged
ASK_SHARE = (
    0.25  # of probe_share, for asking the predictor: dearer than a draft level, and its worth changes more slowly
)
PROBE_CAP = 3.0  # probes that a long quiet time can save up


class Asking:
    """probe_share: of the time, what may go into looking again; asking gets ASK_SHARE of it. Seconds and tokens."""

    def __init__(self, probe_share: float) -> None:
        self._share = ASK_SHARE * probe_share
        self._gains: dict[int, Mean] = {}  # tokens that a step gains by asking, by requests in the batch
        self._answers = 0
        self._allowance = 0.0  # seconds

    def pays(self, requests: int, charge: float) -> bool:
        """charge: of asking, in tokens. True as well while too little is known."""
        if self._answers < ASK_TRIALS:
            return True
        known = nearest(self._gains, requests)
        return (known.value(0.0, 1e-9) if known is not None else 0.0) >= charge

    def may_probe(self, seconds: float, plain_seconds: float) -> bool:
        """Whether enough was saved up for asking though it does not pay; if not, this plain step saves some."""
        if self._allowance >= seconds:
            return True
        self._allowance += self._share * plain_seconds
        return False

    def probed(self, seconds: float) -> None:
        self._allowance = min(self._allowance, PROBE_CAP * seconds) - seconds

    def cannot_matter(self, requests: int) -> None:
        self._gains.setdefault(requests, Mean(KIND_STEPS)).add(0.0)

    def learn(self, requests: int, gain: float) -> None:
        """gain: tokens by which an answer made the choice better."""
        self._gains.setdefault(requests, Mean(KIND_STEPS)).add(max(0.0, gain))
        self._answers += 1
