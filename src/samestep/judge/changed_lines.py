"""Finds the lines that differ between two sides of a script, the likeliest cause of a difference first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from samestep.records.call_site import CallSite, ChangedLines
from samestep.records.findings import Finding, Question

AROUND = 1  # lines that are shown before and after
FAR = 100_000  # lines: of another file
ALIKE = 0.5  # share of lines in common, from which on a file is taken for one that was moved
LONGEST = 40  # lines of a hunk that are shown
# Words by which a line is about a question.
WORDS: Mapping[Question, str] = {
    "steps": r"step|accum|break|continue",
    "initial weights": r"seed|init|std|normal_|uniform_|zeros|ones|bias|gain|load|require|freeze|Linear|Conv|Embedding",
    "rows": r"sampler|shuffle|seed|batch|loader|dataset|transform|crop|flip|augment|rank|world|epoch|drop_last|split"
    r"|rand|generator|mean|std|deviation|normali",
    "micro-batches": r"accum|micro|step|no_sync",
    "precision": r"autocast|amp|dtype|bfloat16|float16|float64|half|double|bf16|fp16|precision",
    "loss": r"loss|entropy|smooth|dropout|drop|weight|scale|mean|sum|label|target|criterion|ignore|mask",
    "gradient": r"zero_grad|grad|backward|loss|scale|dropout|detach|no_sync|reduce|clip|accum|hook",
    "clipping": r"clip|norm|max_",
    "rate": r"\blr\b|rate|sched|warm|decay|gamma|group",
    "settings": r"betas?|momentum|decay|eps|nesterov|amsgrad|optim|SGD|Adam",
    "weights": r"optim|step|decay|mul_|add_|copy_|data|SGD|Adam|update",
    "frozen weights": r"ema|averag|decay|momentum|teacher|target|lerp|mul_|copy_|queue|tau|alpha",
    "buffers": r"momentum|Norm|eval|train|buffer|stat",
    "schedule": r"sched|lr|gamma|T_max|step_size|milestone|warm|total|epochs|eta",
    "order": r"set_epoch|shuffle|seed|sampler|generator|epoch",
}
TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\"[^\"\n]*\"|'[^'\n]*'|\S")
STRING = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
CONSTANTS = {"True", "False", "None"}
GIVEN = r"(?m)(?:def|class|for|as) +{name}\b|(?<![(, ]){name} *(?::[^=\n]+)?=(?!=)|^ *{name} *=(?!=)"
IGNORED = re.compile(r"\s*(#.*|import .*|from .* import .*|[\])}]*,?|\"\"\".*)?")


def changed_lines(
    before: Mapping[str, str],
    after: Mapping[str, str],
    finding: Finding | None,
    sites: Sequence[CallSite] = (),
    expected_sites: Sequence[CallSite] = (),
) -> list[ChangedLines]:
    """Returns each place that differs, those that a finding is likely to come from before the others.

    before, after: name of a file -> its text, of files that are not the same on both sides. sites, expected_sites: the
    finding's lines, with the files' names as they are here.
    """
    ranked = []
    for name, name_after in _pairs(before, after):
        lines = before.get(name, "").splitlines(), after.get(name_after, "").splitlines()
        matcher = difflib.SequenceMatcher(None, lines[0], lines[1], autojunk=False)
        for group in matcher.get_grouped_opcodes(AROUND):
            hunk = _hunk(group, lines[0], lines[1])
            _, start, _, other_start, _ = next(step for step in group if step[0] != "equal")
            place = ChangedLines(name, name_after, (other_start if name_after else start) + 1, hunk)
            spans = (group[0][1] + 1, group[-1][2]), (group[0][3] + 1, group[-1][4])
            distance = min(_distance(name, spans[0], expected_sites), _distance(name_after, spans[1], sites))
            ranked.append(((*_rank(hunk, finding, after.get(name_after, "")), distance), place))
    return [place for _, place in sorted(ranked, key=lambda pair: pair[0])]


def _pairs(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (name before, name after) of each file; '' where a side has none. A file that was moved is known by its
    lines."""
    gone, new = [name for name in before if name not in after], [name for name in after if name not in before]
    pairs = [(name, name) for name in before if name in after]
    for name in gone:
        lines = {*before[name].splitlines()}
        shares = {new_name: len(lines & {*after[new_name].splitlines()}) / max(len(lines), 1) for new_name in new}
        best = max(shares, key=lambda new_name: shares[new_name], default="")
        if best and shares[best] >= ALIKE:
            new.remove(best)
            pairs.append((name, best))
        else:
            pairs.append((name, ""))
    return [*pairs, *(("", name) for name in new)]


def _hunk(group: Sequence[tuple[str, int, int, int, int]], before: Sequence[str], after: Sequence[str]) -> str:
    lines = [f"@@ -{group[0][1] + 1},{group[-1][2] - group[0][1]} +{group[0][3] + 1},{group[-1][4] - group[0][3]} @@"]
    for tag, start, end, other_start, other_end in group:
        if tag == "equal":
            lines += [f" {line}" for line in before[start:end]]
            continue
        lines += [f"-{line}" for line in before[start:end]] + [f"+{line}" for line in after[other_start:other_end]]
    return "\n".join([*lines[:LONGEST], *(["…"] if len(lines) > LONGEST else [])])


def _rank(hunk: str, finding: Finding | None, after: str) -> tuple[bool, bool, bool]:
    """Returns whether a hunk changes comments, imports and names alone; whether it has nothing to do with the finding;
    and whether it changes strings alone, such as the name of a file.

    after: the file's text after the change.
    """
    removed, added = ([line[1:] for line in hunk.splitlines()[1:] if line[:1] == sign] for sign in "-+")
    said = [line for line in (*removed, *added) if not IGNORED.fullmatch(line)]
    words = WORDS.get(finding.question, "") if finding else ""
    if finding and finding.message.fields.get("name"):  # of a setting
        words = re.escape(str(finding.message.fields["name"]))
    lines = [line for line in said if words and re.search(words, line, re.IGNORECASE)]
    without = ([STRING.sub("", line) for line in side] for side in (removed, added))
    return not said or _renames(removed, added, after), not lines, len({*map(tuple, without)}) == 1


def _renames(removed: Sequence[str], added: Sequence[str], after: str) -> bool:
    """Returns whether lines differ only in names that the script itself gives, as to a variable or an attribute."""
    before, now = (TOKEN.findall("\n".join(lines)) for lines in (removed, added))
    apart = {(old, new) for old, new in zip(before, now) if old != new}
    if len(before) != len(now) or not apart:
        return False
    names = {new for _, new in apart}
    of_names = all(part.isidentifier() and part not in CONSTANTS for pair in apart for part in pair)
    return of_names and all(re.search(GIVEN.format(name=name), after) for name in names)


def _distance(file: str, span: tuple[int, int], sites: Sequence[CallSite]) -> int:
    """Returns how many lines a place is from the nearest of a finding's lines."""
    away = [max(span[0] - site.line, site.line - span[1], 0) for site in sites if site.file == file]
    return min(away, default=FAR)
