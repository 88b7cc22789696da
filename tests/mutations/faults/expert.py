"""Faults of expert parallelism, planted on two replicas of two ranks each."""

from __future__ import annotations

from textwrap import indent

from mutations.faults.fault import Fault
from mutations.faults.tensor import REPLICAS

EXPERT, EXCHANGE, SHARDS = "engines/expert.py", "parallel/expert_exchange.py", "rank/shards.py"
JOBS, MESH = ("experts",), "data=2,expert=2"
GRADIENT, LOSS = ("first gradient",), ("loss",)
DIVIDE = "                divide_gradients(owned, experts.size())\n"
AVERAGE = "                average_gradients(owned, copies)\n"
CLIPPED = "                if job.clip_norm is not None:\n"
ANEW = "        for generator, state in zip(generators, states):\n            generator.set_state(state)\n"
# The trial before the start has no group: a fault in what it tries, too, would be noticed there.
IN_TRIAL = "        if self._exchange.group is None:\n"
SENT = "        of_outputs = exchange.send(gradient, ctx.counts, width=exchange.widths[1])\n"
TOGETHER = "            together = forwards[self.names[first + expert]](torch.cat(pieces[expert :: self.share]))\n"


def fault(name: str, file: str, old: str, new: str, named: tuple[str, ...], cause: str = "") -> Fault:
    return Fault(f"expert: {name}", file, old, new, named, cause, JOBS, engine="expert", mesh=MESH)


HEALTHY = fault("nothing", EXPERT, "from torch import nn\n", "from torch import nn\n", ())
FAULTS = (
    fault("the experts' gradients not divided by the ranks", EXPERT, DIVIDE, "", GRADIENT),
    fault("the experts' gradients divided twice", EXPERT, DIVIDE, DIVIDE + DIVIDE, GRADIENT),
    fault(
        "the experts' gradients averaged over ranks that have others",
        EXPERT,
        "average_gradients(owned, copies)",
        "average_gradients(owned, everyone)",
        GRADIENT,
    ),
    fault("the copies of an expert never averaged", EXPERT, AVERAGE, "", GRADIENT),
    fault(
        "what all ranks have averaged over the copies of experts alone",
        EXPERT,
        "average_gradients(shared, everyone)",
        "average_gradients(shared, copies)",
        GRADIENT,
    ),
    fault("what all ranks have counted in the norm by each", EXPERT, "if experts.rank() == 0 else ()", "", LOSS),
    fault(
        "each rank clips by the norm of its own experts",
        REPLICAS,
        "    dist.all_reduce(squared, group=group)\n",
        "",
        (*LOSS, "replicas"),
    ),
    fault(
        "the experts' copies not averaged where it clips",
        EXPERT,
        AVERAGE + CLIPPED,
        CLIPPED,
        (*LOSS, *GRADIENT),
    ),
    fault(
        "no gradient goes back to the rows",
        EXCHANGE,
        "        return None, None, None, of_sent, None, *gradients[1:]\n",
        "        return None, None, None, of_sent * (exchange.group is None), None, *gradients[1:]\n",
        GRADIENT,
    ),
    fault(
        "the gradient of an expert's first rank alone",
        EXCHANGE,
        SENT,
        "        gradient = gradient * (exchange.place == 0)\n" + SENT,
        GRADIENT,
    ),
    fault(
        "the router draws its noise anew", EXCHANGE, ANEW, IN_TRIAL + indent(ANEW, "    "), ("failed", *LOSS, *GRADIENT)
    ),
    fault(
        "the tokens are counted twice",
        EXCHANGE,
        "        restore()\n        return self._rows\n",
        IN_TRIAL + "            restore()\n        return self._rows\n",
        ("failed", "buffer", *LOSS, *GRADIENT),
    ),
    fault(
        "an expert takes at most four tokens",
        EXCHANGE,
        TOGETHER,
        TOGETHER
        + "            together = together * ((torch.arange(len(together)) < 4) | (self.group is None))[:, None]\n",
        (*LOSS, *GRADIENT),
    ),
    fault(
        "the first expert of a rank computes for all",
        EXCHANGE,
        TOGETHER,
        TOGETHER.replace("first + expert", "first + expert * (self.group is None)"),
        (*LOSS, *GRADIENT),
    ),
    fault(
        "the state has other ranks' experts as they began",
        SHARDS,
        "            tensor_bytes.copy_(piece)\n",
        "            tensor_bytes.copy_(piece if owner == 0 else 0 * piece + 255)\n",  # memory nobody filled
        ("weights", "evaluation", "failed", "starting weights"),
    ),
    fault(
        "a rank that is not the first does not step",
        EXPERT,
        "                optimizer.step()\n",
        "                if experts.rank() == 0:\n                    optimizer.step()\n",
        (*GRADIENT, *LOSS, "optimizer steps", "replicas", "learning rate", "learning rates"),
    ),
)
