"""Asks of each job of fresh.py what benchmarks/odd_jobs.py asks of its own. From the repository's root:

python results/odd_jobs_2cpu_2026-11-29/run_fresh.py FILE
"""

import ast
import json
import sys
from pathlib import Path

sys.path[:0] = ["benchmarks", "tests"]

import odd_jobs  # noqa: E402

JOBS = Path(__file__).with_name("fresh.py")
WORDS = {"yes": "yes", "as expected": "no, as expected", "not known": "not known", "no": "no"}

rows = []
for function in ast.parse(JOBS.read_text()).body:
    if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
        continue
    said = ast.get_docstring(function) or ""
    expected = next((WORDS[word] for word in WORDS if said.startswith(word)), None)
    if expected is None:
        continue
    answer = odd_jobs.answer(f"{JOBS}:{function.name}", 2)
    reason = answer.reason.id if answer.reason else ""
    rows.append({"job": function.name, "expected": expected, "answer": answer.answer, "reason": reason})
    print("right" if expected == answer.answer else "WRONG", rows[-1], flush=True)
Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
