from dataclasses import dataclass, field

from torch import nn


@dataclass
class SpecMetadata:
    request_ids: list = field(default_factory=list)
    seq_lens: list = field(default_factory=list)
    num_generations: int = 0

    def prepare(self):
        assert self.num_generations <= len(self.request_ids) == len(self.seq_lens)


class SpecWorkerBase(nn.Module):
    """Nobody but this class may define forward; drafting leaves the attention's metadata saying that no request reads its prompt."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must not override SpecWorkerBase.forward")

    def forward(self, *args, **kwargs):
        return self._forward_impl(*args, **kwargs)
