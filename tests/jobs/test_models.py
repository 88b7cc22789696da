"""The small models are the published ones: against transformers' own of the same name, and their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.jobs.models.gpt import GPT
from samestep.jobs.models.resnet import resnet18, resnet50


def shaken(model: nn.Module) -> nn.Module:
    """With weights and statistics that hide nothing: no norm is the identity, no block starts as one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.running_var):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
                for tensor in (module.bias, module.running_mean):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) / 10)
    return model.eval()


def transplanted(ours: nn.Module, layer_type: str, depths: list[int]) -> nn.Module:
    """transformers' ResNet with our weights, which it holds in the same order but for shortcuts, which it has first."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [16 * 2**stage * (4 if layer_type == "bottleneck" else 1) for stage in range(4)]
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=sizes, depths=depths, layer_type=layer_type, num_labels=7, hidden_act="relu"
    )
    theirs = ResNetForImageClassification(config)
    blocks: list[nn.Module] = [
        getattr(ours, f"layer{stage}")[place] for stage in range(1, 5) for place in range(depths[stage - 1])
    ]
    own = [*ours.conv1.state_dict().values(), *ours.bn1.state_dict().values()]  # type: ignore[union-attr]
    for block in blocks:
        parts = dict(block.named_children())
        shortcut = [name for name, part in parts.items() if isinstance(part, nn.Sequential | nn.Identity)]
        for name in [*shortcut, *(name for name in parts if name not in shortcut)]:
            own += parts[name].state_dict().values()
    own += ours.fc.state_dict().values()  # type: ignore[union-attr]
    names = list(theirs.state_dict())
    assert [list(theirs.state_dict()[name].shape) for name in names] == [list(tensor.shape) for tensor in own]
    theirs.load_state_dict(dict(zip(names, own)))
    return theirs.eval()


@pytest.mark.parametrize(
    ("make", "layer_type", "depths"), [(resnet18, "basic", [2, 2, 2, 2]), (resnet50, "bottleneck", [3, 4, 6, 3])]
)
def test_a_resnet_computes_what_transformers_does(make: Any, layer_type: str, depths: list[int]) -> None:
    ours = shaken(make(7, width=16))
    theirs = transplanted(ours, layer_type, depths)
    images = torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images).logits, atol=1e-4)


def test_bytes_are_normalised_as_floats_would_be() -> None:
    model = shaken(resnet18(5, width=4, small=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3)))
    pixels = torch.randint(256, (2, 32, 24, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    floats = (pixels / 255 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.25, 0.3])
    assert torch.allclose(model(pixels), model(floats.permute(0, 3, 1, 2)), atol=1e-5)


def test_group_norm_looks_at_each_image_alone() -> None:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for norm, alone in (("group", True), ("batch", False)):
        torch.manual_seed(0)
        model = resnet18(5, width=8, small=True, norm=norm).train()
        assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-4) is alone


def test_every_block_starts_as_the_identity() -> None:
    ends = [block.bn3 for stage in (1, 2, 3, 4) for block in getattr(resnet50(5, width=4), f"layer{stage}")]
    assert len(ends) == 16 and all((end.weight == 0).all() for end in ends)


def test_gpts_output_layer_is_its_embedding() -> None:
    model = GPT(11, 12, layers=1, heads=2, width=16)
    assert model.head.weight is model.token.weight
