"""A stand-in for evaluate: a metric that counts."""


class Metric:
    def __init__(self):
        self.rows = 0

    def add_batch(self, predictions, references):
        self.rows += len(references)

    def compute(self, **_):
        return {"rows": self.rows}


def load(*_, **__):
    return Metric()
