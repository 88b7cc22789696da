"""The pages docs/collectives.md and docs/zh/collectives.md, made of what three real ranks held."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.records.collectives import COLLECTIVES, DTYPES, KINDS, REDUCTIONS, CollectivePlan, CollectiveRank
from samestep.report.collective_text import held_before_and_after

HERE, DOCS = Path(__file__).parent, Path(__file__).parents[3] / "docs"
PAGES = {"en": DOCS / "collectives.md", "zh": DOCS / "zh" / "collectives.md"}
CHINESE_KINDS = {"reduce": "归约", "one": "从一个 rank 出发，或汇到一个 rank", "all": "所有 rank 到所有 rank"}
CHINESE_KINDS |= {"pair": "两个 rank 之间", "wait": "等待"}
CHINESE = {
    "all_reduce": "每个 rank 都得到所有 rank 的和（或其他归约）。",
    "reduce": "一个 rank 得到所有 rank 的和（或其他归约）。",
    "reduce_scatter": "每个 rank 得到和中属于自己的一份；各份来自列表。",
    "reduce_scatter_tensor": "每个 rank 得到和中属于自己的一份；各份是同一个张量的片段。",
    "broadcast": "每个 rank 都得到某一个 rank 的张量。",
    "scatter": "一个 rank 分给每个 rank 一个张量。",
    "gather": "一个 rank 得到所有 rank 的张量。",
    "all_gather": "每个 rank 都得到所有 rank 的张量，放在列表里。",
    "all_gather_into_tensor": "每个 rank 都得到所有 rank 的张量，拼成一个张量。",
    "all_to_all": "每个 rank 从列表里给每个 rank 一个张量。",
    "all_to_all_single": "每个 rank 把一个张量的各段分给每个 rank。",
    "send_recv": "一个 rank 发送张量，另一个接收；双方都等待完成。",
    "isend_irecv": "同上但不等待：由 wait() 等待。",
    "batch_isend_irecv": "每个 rank 发给下一个，并从上一个接收。",
    "broadcast_object_list": "每个 rank 都得到某一个 rank 的 Python 对象。",
    "scatter_object_list": "一个 rank 分给每个 rank 一个 Python 对象。",
    "gather_object": "一个 rank 得到每个 rank 的一个 Python 对象。",
    "all_gather_object": "每个 rank 都得到每个 rank 的一个 Python 对象。",
    "barrier": "所有 rank 都到达之前，谁也不离开。",
    "monitored_barrier": "同上；rank 0 会指出没有按时到达的 rank。",
}
HEADINGS = {"en": ("Bus bandwidth / algorithm bandwidth", "none"), "zh": ("总线带宽 / 算法带宽", "无")}


def plan(*names: str) -> CollectivePlan:
    """What the pages, and --show, ask the ranks to do."""
    about = {"backend": "gloo", "dtypes": ("int64",), "reductions": ("sum",), "groups": False, "elements": 2}
    return CollectivePlan("", 0.0, names or tuple(COLLECTIVES), **about)  # type: ignore[arg-type]


def values_plan(*names: str) -> CollectivePlan:
    """Every value of these collectives, or of all."""
    return CollectivePlan("", 0.0, names or tuple(COLLECTIVES), "gloo", DTYPES, REDUCTIONS)


def page(language: str, ranks: Sequence[CollectiveRank]) -> str:
    """The whole page, from its first part, which is beside this file, and what the ranks held."""
    kinds: Mapping[str, str] = KINDS if language == "en" else CHINESE_KINDS
    text = [(HERE / f"page.{language}.md").read_text().rstrip()]
    for kind, heading in kinds.items():
        text.append(f"## {heading}")
        for name in (name for name, facts in COLLECTIVES.items() if facts.kind == kind):
            text.append(_entry(language, name, ranks))
    return "\n\n".join(text) + "\n"


def _entry(language: str, name: str, ranks: Sequence[CollectiveRank]) -> str:
    facts = COLLECTIVES[name]
    factor, none = HEADINGS[language]
    does = facts.does if language == "en" else CHINESE[name]
    bus = f"{factor}: {facts.bus_factor or none}" if language == "en" else f"{factor}：{facts.bus_factor or none}"
    held = re.sub(r"\S+ = .* (\(not defined\))", r"\1", held_before_and_after(ranks, name))
    code = f"```python\n{ranks[0].code[name]}\n```"
    return "\n\n".join([f"### {name}", does, code, f"```text\n{held}\n```", bus])
