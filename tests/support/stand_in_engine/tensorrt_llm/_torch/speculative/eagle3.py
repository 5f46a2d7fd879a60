from .interface import SpecMetadata, SpecWorkerBase


class Eagle3OneModelWorker(SpecWorkerBase):
    def __init__(self, spec_config):
        super().__init__()
        self.spec_config = spec_config

    @property
    def max_draft_len(self):
        return self.spec_config.max_draft_len


class Eagle3OneModelSpecMetadata(SpecMetadata):
    """Also of multi-token prediction with one module."""

    def prepare(self):
        super().prepare()
