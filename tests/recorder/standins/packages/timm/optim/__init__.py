"""Optimizers that scripts import by name, and do not use here."""

import sys
import types

NAMES = {"adafactor": "Adafactor", "adahessian": "Adahessian", "adamp": "AdamP", "lookahead": "Lookahead"}
NAMES |= {"nadam": "Nadam", "novograd": "NovoGrad", "nvnovograd": "NvNovoGrad", "radam": "RAdam"}
NAMES |= {"rmsprop_tf": "RMSpropTF", "sgdp": "SGDP"}
for module, name in NAMES.items():
    sys.modules[f"{__name__}.{module}"] = made = types.ModuleType(f"{__name__}.{module}")
    setattr(made, name, None)
