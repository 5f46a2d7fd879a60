from dataclasses import dataclass, field


@dataclass
class SpecMetadata:
    request_ids: list = field(default_factory=list)
    seq_lens: list = field(default_factory=list)
    num_generations: int = 0

    def prepare(self):
        self.num_generations = len(self.request_ids)
