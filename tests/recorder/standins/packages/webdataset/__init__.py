"""A stand-in for webdataset, which is imported and not used here."""


class PipelineStage: ...
