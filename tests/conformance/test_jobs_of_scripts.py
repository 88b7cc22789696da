"""Jobs as public scripts write them: each is proven on every engine, or refused in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from conformance.table import EXACT
from inspected_job import inspected_job
from lane_marks import shared_out
from ranks import KeptRanks, Ranks, RanksFailed, engine_facts, prove
from samestep.commands.engine_rows import refusal
from samestep.errors import UserError, message_in
from samestep.message import as_said, message
from samestep.rank.fsdp_units import units_of
from samestep.records.inspection import JobFacts
from samestep.records.results import Verdict

FILE = f"{Path(__file__).parent}/jobs_of_scripts.py"
IMPORTS = "torchmetrics transformers.modeling_outputs"  # of the jobs
UNITS = {
    "auto": ["transformer.h.0", "transformer.h.1"],
    "children": ["transformer.h.0", "transformer.h.1", "transformer.ln_f", "transformer.wpe"],
    "root": [],
    "Block": ["transformer.h.0", "transformer.h.1"],
    "LayerNorm": ["transformer.h.0.norm", "transformer.h.1.norm", "transformer.ln_f"],
    "Embedding": ["transformer.wpe"],  # the other shares its weight with the head
}


def units(model: nn.Module, wrap: str) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return sorted(names[id(unit)] for unit in units_of(model, wrap))


@pytest.mark.parametrize("wrap", UNITS)
def test_the_units_of_nanogpt(wrap: str) -> None:
    from conformance.jobs_of_scripts import NanoGPT  # with torchmetrics, which takes seconds

    assert units(NanoGPT(tied=True), wrap) == UNITS[wrap]


def test_what_is_read_from_outside_stays_in_the_root() -> None:
    from conformance.jobs_of_scripts import ReadsWeights

    model = ReadsWeights()
    assert units(model, "children") == ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert units(model, "Embedding") == []
    assert "transformer.h.0.attention" in units(model, "MultiheadAttention")
    assert units(model, "NonDynamicallyQuantizableLinear") == []  # its attention reads its weights


def test_an_encoder_is_not_one_unit() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    bert = BertForSequenceClassification(BertConfig(num_hidden_layers=3, **sizes))
    assert units(bert, "auto") == units(bert, "BertLayer") == [f"bert.encoder.layer.{n}" for n in range(3)]
    says = "fsdp.wrap=Bertlayer: the model has no module of this class; name one of BertAttention, .* BertLayer, "
    with pytest.raises(UserError, match=says):
        units(bert, "Bertlayer")


class Bench(ExitStack):
    """Ranks kept between proofs, and the one that plays the references."""

    def __init__(self) -> None:
        super().__init__()
        self.reference_rank = self.enter_context(Ranks(1, imports=IMPORTS))
        self.ranks = self.enter_context(KeptRanks(IMPORTS))

    def prove(self, job: str, engine: str, given: Mapping[str, str], size: int) -> Verdict:
        """The verdict, also on what is refused before it starts or while it trains."""
        name, _, chosen = job.partition(":")
        settings = {"name": chosen} if chosen else {}
        facts = engine_facts(engine, size, given)
        if not facts.available:
            assert "CI" not in os.environ, facts.reason
            pytest.skip(str(facts.reason))
        if why := refusal(facts, _inspected(name, chosen, size)):
            return Verdict("refused", reason=why)
        ranks = self.ranks.of(size, engine, given)
        try:
            return prove(self.reference_rank, ranks, f"{FILE}:{name}", engine, settings, given)
        except RanksFailed as failed:
            if "samestep.errors.Refused: " not in str(failed):
                raise
            line = str(failed).rpartition("samestep.errors.Refused: ")[2].strip()
            return Verdict("refused", reason=message_in(line) or as_said(line))


@cache
def _inspected(name: str, chosen: str, size: int) -> JobFacts:
    return inspected_job(f"{FILE}:{name}", {"name": chosen} if chosen else {}, size)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


JOBS = (
    "nanogpt",
    "reads_weights",
    "twice",
    "returns_a_dict",
    "returns_a_model_output",
    "lora",
    "lora_trained_alone",
    "sparse_buffer_of_two",
)
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in EXACT},
    "fsdp wrap=children reshard=false": ("fsdp", {"wrap": "children", "reshard": "false"}),
    "fsdp wrap=Linear": ("fsdp", {"wrap": "Linear"}),
    "fsdp wrap=root": ("fsdp", {"wrap": "root"}),
    "fsdp checkpoint": ("fsdp", {"checkpoint": "true"}),
    "fabric model_parallel": ("fabric", {"strategy": "model_parallel"}),
    "lightning model_parallel": ("lightning", {"strategy": "model_parallel"}),
    "deepspeed stage=2": ("deepspeed", {"stage": "2"}),
    "deepspeed stage=3": ("deepspeed", {"stage": "3"}),
}
PROVEN = [name for name in ENGINES if name != "deepspeed stage=2"]  # its loop is that of stage 1


@pytest.mark.parametrize(("name", "jobs"), shared_out(PROVEN, JOBS, of=6))
def test_the_same_on_every_engine(name: str, jobs: list[str], bench: Bench) -> None:
    verdicts = {job: bench.prove(job, *ENGINES[name], 2) for job in jobs}
    assert {job: verdict for job, verdict in verdicts.items() if verdict.verdict != "same"} == {}


@pytest.mark.parametrize(("name", "jobs"), shared_out(["ddp", "fsdp", "zero"], JOBS, of=3))
def test_the_same_at_three_ranks(name: str, jobs: list[str], bench: Bench) -> None:
    verdicts = {job: bench.prove(job, *ENGINES[name], 3) for job in jobs}
    assert {job: verdict for job, verdict in verdicts.items() if verdict.verdict != "same"} == {}


def test_a_part_of_a_unit_that_is_called_by_itself_is_refused(bench: Bench) -> None:
    verdict = bench.prove("peeks", "fsdp", {}, 2)
    assert verdict.verdict == "refused"
    why = verdict.reason
    assert why and (why.id, why.fields["parameter"]) == ("shard_read_outside_of_its_unit", "blocks.0.norm.bias")
    assert why.fields["remedy"] == message("keep_fsdp_parameters_whole")


def test_a_parameter_without_gradient_in_some_steps_is_named(bench: Bench) -> None:
    verdict = bench.prove("routed", "ddp", {}, 2)
    assert verdict.verdict == "refused"
    why = message("parameters_have_no_gradient", parameters=["expert.weight", "expert.bias"])
    assert verdict.reason == why


@pytest.mark.check
def test_what_the_refusals_name_helps(bench: Bench) -> None:
    assert bench.prove("peeks", "fsdp", {"wrap": "root"}, 2).verdict == "same"
    assert bench.prove("routed", "ddp", {"find_unused": "true"}, 2).verdict == "same"


OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "Rprop")
REFUSED = {
    "fsdp": {"Adafactor", "Muon", "Rprop"},
    "fabric model_parallel": {"Adafactor", "Muon", "Rprop"},
    "lightning model_parallel": {"Adafactor", "Muon", "Rprop"},
    "deepspeed": {"Adafactor", "Adagrad", "Muon"},
    "deepspeed stage=2": {"Adafactor", "Adagrad", "Muon"},
    "deepspeed stage=3": {"Adafactor", "Adagrad", "Muon"},
}


@pytest.mark.parametrize("name", ["ddp", "zero", "fabric", "horovod", *REFUSED])
def test_an_optimizer_that_the_engine_cannot_take_is_refused(name: str) -> None:
    facts = engine_facts(ENGINES[name][0], 2, ENGINES[name][1])
    if not facts.available:
        assert "CI" not in os.environ, facts.reason
        pytest.skip(str(facts.reason))
    whys = {each: refusal(facts, _inspected("optimizer", each, 2)) for each in OPTIMIZERS}
    refused = {each: why for each, why in whys.items() if why}
    assert {*refused} == REFUSED.get(name, set())
    for each, why in refused.items():
        assert (why.id, why.fields["engine"]) == ("engine_cannot_take_optimizer", facts.name)
        assert why.fields["optimizer"] == each


TAKE_OTHERS = ["ddp", "zero", "fsdp", "fabric model_parallel", "horovod", "deepspeed", "deepspeed stage=3"]


@pytest.mark.parametrize(("name", "optimizers"), shared_out(TAKE_OTHERS, OPTIMIZERS, of=4))
def test_every_other_optimizer_is_the_same(name: str, optimizers: list[str], bench: Bench) -> None:
    verdicts = {each: bench.prove(f"optimizer:{each}", *ENGINES[name], 2) for each in optimizers}
    refused = {each for each, of in verdicts.items() if of.verdict == "refused"}
    assert refused == REFUSED.get(name, set()) & {*optimizers}
    assert {each: of for each, of in verdicts.items() if of.verdict not in ("same", "refused")} == {}
