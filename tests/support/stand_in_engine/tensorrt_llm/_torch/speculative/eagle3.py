from torch import nn

from .interface import SpecMetadata


class Eagle3OneModelWorker(nn.Module):
    pass


class Eagle3OneModelSpecMetadata(SpecMetadata):
    def prepare(self):
        super().prepare()
