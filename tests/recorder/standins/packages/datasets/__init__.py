"""A stand-in for datasets: load_dataset() of made sentences or of JSON lines, and the mappings that scripts use."""

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(40)]
PAIRS, TEXT, ANSWERS = ("sentence1", "sentence2"), ("text",), ("prompt", "chosen", "rejected")


class Dataset:
    def __init__(self, columns):
        self.columns = columns

    @property
    def column_names(self):
        return list(self.columns)

    @property
    def features(self):
        return self.columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        if isinstance(index, str):
            return self.columns[index]
        return {name: values[index] for name, values in self.columns.items()}

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    @property
    def format(self):
        return {"type": None}

    def map(self, function, batched=False, remove_columns=(), fn_kwargs=None, **_):
        given = fn_kwargs or {}
        if batched:
            made = function(dict(self.columns), **given)
        else:
            rows = [function(row, **given) for row in self]
            made = {name: [row[name] for row in rows] for name in rows[0]}
        kept = {name: values for name, values in self.columns.items() if name not in (remove_columns or ())}
        many = len(next(iter(made.values())))
        return Dataset({name: each for name, each in kept.items() if len(each) == many} | dict(made))

    def filter(self, function, fn_kwargs=None, **_):
        return self.select([index for index, row in enumerate(self) if function(row, **(fn_kwargs or {}))])

    def select_columns(self, names):
        return Dataset({name: self.columns[name] for name in self.columns if name in names})

    def rename_column(self, old, new):
        return Dataset({new if name == old else name: values for name, values in self.columns.items()})

    def remove_columns(self, names):
        return Dataset({name: values for name, values in self.columns.items() if name not in names})

    def select(self, indices):
        return Dataset({name: [values[index] for index in indices] for name, values in self.columns.items()})

    def shuffle(self, seed=None):
        indices = list(range(len(self)))
        random.Random(seed).shuffle(indices)
        return self.select(indices)

    def set_format(self, *_, **__): ...


class IterableDataset: ...


class IterableDatasetDict(dict): ...


def concatenate_datasets(parts):
    return Dataset({name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns})


class DatasetDict(dict):
    def _each(name):
        return lambda self, *args, **kwargs: DatasetDict(
            {key: getattr(value, name)(*args, **kwargs) for key, value in self.items()}
        )

    map, rename_column, remove_columns = _each("map"), _each("rename_column"), _each("remove_columns")

    def set_format(self, *_, **__): ...

    @property
    def column_names(self):
        return {name: each.column_names for name, each in self.items()}


def made(names, seed, rows=96):
    draw = random.Random(seed)
    columns = {name: [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(rows)] for name in names}
    if names == TEXT:
        return Dataset(columns)
    return Dataset(columns | {"label": [draw.randint(0, 1) for _ in range(rows)], "idx": list(range(rows))})


def preferences(seed, rows=96):
    """Returns prompts with a chosen and a rejected answer."""
    return Dataset({name: made(TEXT, 3 * seed + number, rows).columns["text"] for number, name in enumerate(ANSWERS)})


def Features(features):
    return features


def Value(dtype):
    return dtype


def Sequence(feature):
    return [feature]


def load_dataset(path, *_, split=None, data_files=None, **__):
    if path == "json":
        rows = [json.loads(line) for line in Path(data_files).read_text().splitlines()]
        return Dataset({name: [row[name] for row in rows] for name in rows[0]})
    if path == "preferences":
        return DatasetDict({name: preferences(seed) for seed, name in enumerate(("train", "test"))})
    names = PAIRS if "glue" in path else TEXT
    splits = DatasetDict({name: made(names, seed) for seed, name in enumerate(("train", "validation", "test"))})
    return splits[split] if split else splits
