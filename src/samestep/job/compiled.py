"""Models that torch.compile has compiled: with the names of the uncompiled ones, and not compiled for a few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def without_wrappers(model: nn.Module) -> nn.Module:
    """Takes off the modules that torch.compile puts around a model and its parts: `_orig_mod.` is in no name.

    What they hold stays compiled, as by nn.Module.compile, and has their hooks.
    """
    model = _inside(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _inside(child)
    return model


def _inside(module: nn.Module) -> nn.Module:
    """Returns the module inside of one of torch.compile's, compiled by itself; any other module as it is."""
    inner = module._modules.get("_orig_mod")
    if inner is None or not hasattr(module, "dynamo_ctx"):
        return module
    compiler: Any = module.dynamo_ctx
    inner._compiled_call_impl = compiler(_frame(inner))
    for name, hooks in vars(module).items():
        if "_hooks" in name and isinstance(hooks, dict):
            vars(inner)[name].update(hooks)
    return inner


def _frame(module: nn.Module) -> Any:
    """Returns the call of a module that torch.compile is given. Where its forward is torch's own, that needs a frame
    around it: torch.compile enters no frame of torch's."""
    call: Any = module._call_impl
    return (lambda *inputs, **named: call(*inputs, **named)) if type(module).__module__.startswith("torch.") else call


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns a model without wrappers that nothing compiles when it is called."""
    model = without_wrappers(model)
    for module in model.modules():
        module._compiled_call_impl = None
    return model
