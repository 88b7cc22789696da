"""Runs a drawn tenth of every corpus, and compares what samestep says with what is kept: exit 1 where it differs.

    python tests/golden/run.py [--whole] [--only WORDS …] [--checkouts FOLDER] [--found FILE] [--rest]
    python tests/golden/run.py --accept NAMES …

--only: cases with one of these words in their names, instead of the drawn ones. --checkouts: as of
tests/recorder/public.py; without it public scripts are skipped. Each case is written to a file (--found) as it ends;
--accept takes the values of these cases from there as the expected ones, by name or by a pattern as twins/gan*, and
runs nothing. Cases that are gone are accepted by their names, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from budget import import_s
from golden.corpora import Case, corpora
from golden.found import Found, counts, differences, line_of, read_all, shown, table, write_all

EXPECTED = Path(__file__).parent / "expected.jsonl"
FOUND = Path("runs") / "golden" / "found.jsonl"
AT_ONCE = 2


def tried(case: Case) -> Found:
    """Runs a case. One that cannot be run is told as such: it differs."""
    try:
        return case.run()
    except Exception as error:
        return Found(case.name, f"not run: {type(error).__name__}", None, findings=[" ".join(str(error).split())[:200]])


def accept(patterns: Sequence[str], known: set[str], found_file: Path) -> int:
    """Writes the found values of the named cases as the expected ones."""
    expected, found = read_all(EXPECTED), read_all(found_file)
    for pattern in patterns:
        named = [name for name in found if fnmatchcase(name, pattern)]
        gone = [name for name in expected if name not in known and fnmatchcase(name, pattern)]
        if not named and not gone:
            print(f"{pattern}: no case of {found_file}, and none that is gone, has this name")
            return 2
        for name in [name for name in named if expected.get(name) != found[name]]:
            expected[name] = found[name]
            print(f"accepted {name}: {shown(found[name])}")
        for name in gone:
            print(f"accepted that {name} is gone")
            del expected[name]
    write_all(expected, EXPECTED)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="every case")
    parser.add_argument("--only", nargs="+", default=[], help="cases with one of these words in their names")
    parser.add_argument("--checkouts", type=Path, help="folder of the public scripts' repositories")
    parser.add_argument("--found", type=Path, default=FOUND, help="where the found values are written")
    parser.add_argument("--rest", action="store_true", help="those alone that --found has not, as after a cut-off run")
    parser.add_argument("--accept", nargs="+", default=[], help="cases whose found values are the expected ones")
    options = parser.parse_args()
    every = corpora(options.checkouts)
    groups = {case.name: case.group for corpus in every for case in corpus.cases}
    if options.accept:
        return accept(options.accept, {*groups}, options.found)
    asked = {*groups} if options.whole else set[str]().union(*(corpus.drawn() for corpus in every))
    if options.only:
        asked = {name for name in groups if any(word in name for word in options.only)}
        if not asked:
            parser.error(f"--only {' '.join(options.only)}: no case has one of these words in its name")
    options.found.parent.mkdir(parents=True, exist_ok=True)
    found = read_all(options.found) if options.rest else {}
    write_all(found, options.found)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))  # as the Makefile has it
    import_s()  # of torch, measured before two commands run at once: deadlines follow it
    began, skipped = time.monotonic(), Counter[str]()
    for corpus in every:
        cases = [case for case in corpus.cases if case.name in asked - found.keys() and not case.lacks]
        skipped.update(case.lacks for case in corpus.cases if case.name in asked and case.lacks)
        if not cases:
            continue
        with corpus.ready(cases), ThreadPoolExecutor(AT_ONCE) as pool, options.found.open("a", buffering=1) as file:
            for ending in as_completed([pool.submit(tried, case) for case in cases]):
                now = ending.result()
                if now.answer == "unavailable":  # a proof's engine, whose package is not here
                    skipped["its engine is not installed"] += 1
                    continue
                found[now.case] = now
                file.write(line_of(now))
                print(f"{time.monotonic() - began:4.0f} s  {now.case}: {shown(now)}", flush=True)
    expected = read_all(EXPECTED)
    rows = differences(expected, found, groups)
    print()
    for lack, count in skipped.items():
        print(f"skipped {count}: {lack}")
    print(", ".join(f"{kind} {count}" for kind, count in Counter(name.split("/")[0] for name in found).items()))
    if rows:
        print(table(rows))
    print(counts(expected, found, rows, skipped.total()), f"in {time.monotonic() - began:.0f} s")
    return int(bool(rows))


if __name__ == "__main__":
    raise SystemExit(main())
