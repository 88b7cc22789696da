"""A stand-in for pandas: read_csv(), and the columns of it."""

import csv


class Column(list):
    @property
    def iloc(self):
        return self

    def tolist(self):
        return [*self]


def read_csv(path, sep=","):
    with open(path) as file:
        rows = [*csv.DictReader(file, delimiter=sep)]
    return {name: Column(row[name] for row in rows) for name in rows[0]}


class DataFrame: ...
