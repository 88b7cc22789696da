"""Draws what a command used over time, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from samestep.message import Message, message
from samestep.records.monitor import GpuUse, Sample
from samestep.report.plots import BLUE, PALETTE, STYLE, WIDTH, svg

GREY = PALETTE[0]
COLOURS = [*PALETTE[1:], GREY]
HEIGHT = 1.7  # inches of a panel
MIB, MB = 2**20, 1e6

Value = Callable[[Sample], float]
Line = tuple[Message, str, Value]  # (its name, its colour, the value or the counter)
OfGpu = Callable[[GpuUse], float | None]
GPU_PANELS: list[tuple[Message, OfGpu]] = [
    (message("panel_of_gpu_utilisation"), lambda gpu: None if gpu.utilisation is None else 100 * gpu.utilisation),
    (message("panel_of_gpu_memory"), lambda gpu: None if gpu.memory is None else gpu.memory / MIB),
    (message("panel_of_gpu_power"), lambda gpu: gpu.power),
    (message("panel_of_gpu_temperature"), lambda gpu: gpu.temperature),
]


def usage(samples: Sequence[Sample]) -> str:
    """A panel each for processors, memory, disk and network, and for the GPUs where there are some."""
    panels: list[tuple[Message, bool, list[Line]]] = [  # (title, whether it is a rate, lines)
        (
            message("panel_of_cores"),
            True,
            [
                (message("line_of_the_machine"), GREY, lambda s: s.machine_cpu_s),
                (message("line_of_the_command"), BLUE, lambda s: s.cpu_s),
            ],
        ),
        (
            message("panel_of_memory"),
            False,
            [
                (message("line_of_the_machine"), GREY, lambda s: s.machine_memory / MIB),
                (message("line_of_the_command"), BLUE, lambda s: s.memory / MIB),
            ],
        ),
        (
            message("panel_of_disk"),
            True,
            [
                (message("line_of_reads"), COLOURS[0], lambda s: s.read / MB),
                (message("line_of_writes"), COLOURS[1], lambda s: s.written / MB),
            ],
        ),
        (
            message("panel_of_network"),
            True,
            [
                (message("line_inside_the_machine"), GREY, lambda s: s.local / MB),
                (message("line_received"), COLOURS[0], lambda s: s.received / MB),
                (message("line_sent"), COLOURS[1], lambda s: s.sent / MB),
            ],
        ),
    ]
    gpus = GPU_PANELS if samples[0].gpus else []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT * (len(panels) + len(gpus))), layout="constrained")
        axes = figure.subplots(len(panels) + len(gpus), 1, sharex=True)
        for of_panel, (title, is_rate, lines) in zip(axes, panels):
            _panel(of_panel, title, samples, lines, is_rate)
        for of_panel, (title, value) in zip(axes[len(panels) :], gpus):
            _gpu_panel(of_panel, title, samples, value)
        axes[-1].set_xlabel(str(message("axis_of_seconds")))
        return svg(figure, "usage", str(message("figure_of_usage")))


def _panel(axes: Axes, title: Message, samples: Sequence[Sample], lines: Sequence[Line], is_rate: bool) -> None:
    seconds = [sample.seconds for sample in samples]
    for name, colour, value in lines:
        if is_rate:  # of each interval, drawn over the whole of it
            spans = [(earlier, later) for earlier, later in pairwise(samples) if later.seconds > earlier.seconds]
            rates = [(value(later) - value(earlier)) / (later.seconds - earlier.seconds) for earlier, later in spans]
            edges = [spans[0][0].seconds, *(later.seconds for _, later in spans)] if spans else [0.0]
            axes.stairs(rates, edges, color=colour, linewidth=1.4, label=str(name), baseline=None)
        else:
            axes.plot(seconds, [value(sample) for sample in samples], color=colour, linewidth=1.4, label=str(name))
    _finish(axes, title)


def _gpu_panel(axes: Axes, title: Message, samples: Sequence[Sample], value: OfGpu) -> None:
    for number in range(len(samples[0].gpus)):
        known = [(sample.seconds, usage) for sample in samples if (usage := value(sample.gpus[number])) is not None]
        if known:
            axes.plot(*zip(*known), color=COLOURS[number % len(COLOURS)], linewidth=1.4, label=f"GPU {number}")
    _finish(axes, title)


def _finish(axes: Axes, title: Message) -> None:
    axes.set_title(str(title), loc="left", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
