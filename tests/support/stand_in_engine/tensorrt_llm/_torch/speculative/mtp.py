from .interface import SpecMetadata


class MTPSpecMetadata(SpecMetadata):
    """Of several multi-token prediction modules."""

    def prepare(self):
        super().prepare()
