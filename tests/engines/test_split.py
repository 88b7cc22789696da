"""The split engine puts a model's layers on devices in order, and moves what goes into them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samestep.engines import split
from samestep.errors import UserError

CPU, META = torch.device("cpu"), torch.device("meta")  # two devices that every machine has


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(inputs)  # type: ignore[no-any-return]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Net(nn.Module):
    """A head whose weight is the embedding's, around blocks."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(7, 4), Body(), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))  # type: ignore[no-any-return]


BLOCKS = [f"body.blocks.{number}" for number in range(4)]


def test_the_layers_are_blocks_and_what_is_around_them() -> None:
    assert [*split.layers_of(Net())] == ["embedding", *BLOCKS, "head"]
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
    assert [*split.layers_of(plain)] == ["0", "1.0", "1.1"]
    assert [*split.layers_of(nn.Linear(3, 3))] == []


def test_parts_are_of_about_equal_weights() -> None:
    model = Net(tied=False)
    assert split.starts_of(model, 2, "") == [BLOCKS[2]]
    assert split.starts_of(model, 6, "") == [*BLOCKS, "head"]
    assert split.starts_of(model, 1, "") == []
    giant_first = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1), nn.Linear(1, 1))
    assert split.starts_of(giant_first, 3, "") == ["1", "2"]
    assert split.starts_of(model, 3, f"{BLOCKS[0]},head") == [BLOCKS[0], "head"]


def test_inputs_go_to_their_layer_and_tied_weights_stay_together() -> None:
    model = Net()
    split.Split(model, [CPU, META], split.starts_of(model, 2, BLOCKS[1]))
    places = {name: {p.device for p in layer.parameters()} for name, layer in split.layers_of(model).items()}
    assert places == {"embedding": {CPU}, BLOCKS[0]: {CPU}, **{name: {META} for name in BLOCKS[1:]}, "head": {CPU}}
    assert model.head.weight is model.embedding.weight
    left: list[torch.device] = []
    model.body.register_forward_hook(lambda module, args, output: left.append(output.device))
    with pytest.raises(NotImplementedError, match="meta"):  # nothing can be moved from there: the way back to the head
        model(torch.arange(5))
    assert left == [META]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stages": 9}, r"the model has 6 layers to put on devices \(embedding, .* …\); give fewer stages"),
        ({"at": "body.blocks.7"}, r"body.blocks.7 is not a later layer; did you mean 'body.blocks.\d'\?"),
        ({"at": "head,body.blocks.1"}, "body.blocks.1 is not a later layer; known are: "),
        ({"at": "head", "stages": 2}, "both say where the model is cut; leave one out"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        split.check(Net(), **settings)  # type: ignore[arg-type]
