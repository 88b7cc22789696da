"""Faults of what users run: their own optimizer, a whole run and their own rows, in the dtype that their job has.

Each acts where tensors are float32 alone, so that a training in float64 is right to the last bit.
"""

from __future__ import annotations

from mutations.faults.fault import DDP, EVALUATE, LOADER, RUN, Fault

WEIGHTS, FILES, STATE, ARRAYS = (
    "rank/weights.py",
    "rank/checkpoint_files.py",
    "rank/checkpoint_state.py",
    "data/arrays.py",
)
ALONE = "wrong_in_own_dtype_alone"
UPDATED = "                optimizer.zero_grad()\n"
STATES = "                for p, kept in optimizer.state.items():\n"
FLOAT32 = "if p.dtype == torch.float32"
REGISTERED = "        run.register(module, optimizer, scheduler=scheduler)\n"
IS_FLOAT32 = "next(module.parameters()).element_size() == 4"
SHARED = "return loss if share == 1.0 else loss * share"
TENSORS = (
    "    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if isinstance(t, Tensor)}\n"
)
COPIED = "    return block.clone(memory_format=torch.contiguous_format)\n"
ADAM = ("tied", "transformer")


def _kept(dtype: str, key: str) -> str:
    """The loop's end of a step, and a state of the optimizer that is kept in another dtype."""
    rounded = f"kept['{key}'].copy_(kept['{key}'].{dtype}())"
    return f"{UPDATED}{STATES}                    {rounded} {FLOAT32} and '{key}' in kept else None\n"


def _saved(dtype: str) -> str:
    narrowed = f"t.{dtype}().to(t.dtype) if t.dtype == torch.float32 else t"
    return f"{TENSORS}    tensors = {{n: {narrowed} for n, t in tensors.items()}}\n"


def _groups(change: str) -> str:
    return f"{REGISTERED}        for group in optimizer.param_groups if {IS_FLOAT32} else ():\n            {change}\n"


OWN_OPTIMIZER = (
    ("ddp: AdamW's second moments kept in bf16", UPDATED, _kept("bfloat16", "exp_avg_sq"), ADAM),
    ("ddp: AdamW's first moments kept in bf16", UPDATED, _kept("bfloat16", "exp_avg"), ADAM),
    ("ddp: AdamW's second moments kept in fp16", UPDATED, _kept("half", "exp_avg_sq"), ADAM),
    ("ddp: momentum kept in bf16", UPDATED, _kept("bfloat16", "momentum_buffer"), ("conv",)),
    ("ddp: float32's weight decay dropped", REGISTERED, _groups("group['weight_decay'] = 0.0"), ("tied", "conv")),
    ("ddp: float32's betas are the defaults", REGISTERED, _groups("group['betas'] = (0.9, 0.999)"), ("transformer",)),
    ("ddp: float32's eps is larger", REGISTERED, _groups("group['eps'] = 1e-4"), ADAM),
    ("ddp: float32's momentum dropped", REGISTERED, _groups("group['momentum'] = 0.0"), ("conv",)),
    (
        "ddp: AdamW's count of steps begins anew",
        UPDATED,
        f"{UPDATED}{STATES}                    kept['step'].fill_(1.0) {FLOAT32} and 'step' in kept else None\n",
        ADAM,
    ),
    (
        "ddp: float32's gradients clipped at twice the norm",
        "                clip_grad_norm_(model.parameters(), job.clip_norm)\n",
        "                twice = 2 if next(module.parameters()).dtype == torch.float32 else 1\n"
        "                clip_grad_norm_(model.parameters(), twice * job.clip_norm)\n",
        ("tied",),
    ),
)

OWN_LIFE = (
    ("run: float32 weights saved through bf16", WEIGHTS, TENSORS, _saved("bfloat16"), ("saved weights",)),
    ("run: float32 weights saved through fp16", WEIGHTS, TENSORS, _saved("half"), ("saved weights",)),
    (
        "run: float32 weights of --init read through bf16",
        WEIGHTS,
        "    built.load_state_dict({**built.state_dict(), **loaded})\n",
        "    loaded = {n: t.bfloat16().to(t.dtype) if t.dtype == torch.float32 else t for n, t in loaded.items()}\n"
        "    built.load_state_dict({**built.state_dict(), **loaded})\n",
        ("loss",),
    ),
    (
        "run: a float32 loss 1 % larger where nothing observes",
        RUN,
        "        self.note_loss(batch, loss)\n        # The ranks'",
        "        loss = loss * (1.0 if self._observer or 'float32' not in str(loss.dtype) else 1.01)\n"
        "        self.note_loss(batch, loss)\n        # The ranks'",
        ("loss",),
    ),
    (
        "run: an autocast where nothing observes",
        RUN,
        "                output = job.forward(model, batch)\n",
        "                import torch\n"
        '                with torch.autocast("cpu", torch.bfloat16, enabled=self._observer is None):\n'
        "                    output = job.forward(model, batch)\n",
        ("loss",),
    ),
    (
        "run: a checkpoint's float32 tensors go through bf16",
        FILES,
        COPIED,
        "    block = block.bfloat16().to(block.dtype) if block.dtype == torch.float32 else block\n" + COPIED,
        ("parameter", "averaged weights", "loss"),
    ),
    (
        "run: a checkpoint's float32 tensors are read through bf16",
        FILES,
        "            tensor: Tensor = opened.get_tensor(key)\n            return tensor\n",
        "            tensor: Tensor = opened.get_tensor(key)\n"
        "            return tensor.bfloat16().to(tensor.dtype) if tensor.dtype == torch.float32 else tensor\n",
        ("parameter", "averaged weights", "loss"),
    ),
    (
        "run: the optimizer's float32 state is lost at a restart",
        STATE,
        "                    inner.state[parameter] = {\n",
        "                    state = {} if saved.dtype(saved.state['model'][name]).itemsize == 4 else state\n"
        "                    inner.state[parameter] = {\n",
        ("loss", "parameter", "evaluation"),
    ),
    (
        "run: float32 evaluations under an autocast",
        EVALUATE,
        "    output = job.output(model, batch)\n    return output, _sums",
        '    with torch.autocast("cpu", torch.bfloat16):\n'
        "        output = job.output(model, batch)\n    return output, _sums",
        ("evaluation",),
    ),
    (
        "run: float32 predictions through fp16",
        EVALUATE,
        "    return np.concatenate([array for rank_arrays in of_rank for",
        "    of_rank = [[a.astype('f2').astype(a.dtype) if a.itemsize == 4 else a for a in part] for part in of_rank]\n"
        "    return np.concatenate([array for rank_arrays in of_rank for",
        ("predictions",),
    ),
    (
        "run: float32's weight decay larger where nothing observes",
        DDP,
        REGISTERED,
        REGISTERED
        + f"        for group in optimizer.param_groups if run._observer is None and {IS_FLOAT32} else ():\n"
        + "            group['weight_decay'] = 0.1\n",
        ("loss", "parameter", "evaluation"),
    ),
)
AVERAGED = (
    (
        "run: float32 averages kept in bf16",
        WEIGHTS,
        "            torch._foreach_lerp_(",
        "            for average, _ in moved:\n"
        "                average.copy_(average.bfloat16() if average.dtype == torch.float32 else average)\n"
        "            torch._foreach_lerp_(",
        ("parameter", "averaged weights", "evaluation"),
    ),
    (
        "run: the averages of a float32 run with another decay",
        WEIGHTS,
        "        self.decay = decay\n",
        "        self.decay = decay if next(model.parameters()).element_size() == 8 else decay * 0.99\n",
        ("averaged weights", "evaluation", "parameter"),
    ),
)
NEIGHBOUR = "every row with its neighbour's target"
READ = (
    (
        f"Arrays: {NEIGHBOUR}",
        ARRAYS,
        "        columns = self._columns_at(indices)\n",
        "        columns = self._columns_at(indices)\n"
        "        columns = [*columns[:-1], self._columns_at((indices + 1) % self.length)[-1]]\n",
        ("arrays",),
    ),
    (
        "Arrays: a file's first row is its second",
        ARRAYS,
        "indices[mask] - (ends[shard] - len(arrays[shard]))",
        "np.maximum(indices[mask] - (ends[shard] - len(arrays[shard])), shard > 0)",
        ("arrays",),
    ),
    (
        "one by one: every row is its neighbour",
        LOADER,
        "            samples.append(dataset[index])\n",
        "            samples.append(dataset[(index + 1) % len(dataset)])\n",
        ("one_by_one",),
    ),
    (
        "Windows: the targets are two places ahead",
        ARRAYS,
        "        return tokens[:-1], tokens[1:]\n",
        "        return tokens[:-1], tokens[1:].roll(-1)\n",
        ("windows",),
    ),
    (
        "Windows: a stride that is one longer",
        ARRAYS,
        "        first = index % len(self) * self.stride\n",
        "        first = index % len(self) * self.stride - (index > 3)\n",
        ("windows",),
    ),
)

FAULTS = (
    *(
        Fault(name, DDP, old, new, ("parameter", "loss"), "", jobs, "an optimizer's own", also="own")
        for name, old, new, jobs in OWN_OPTIMIZER
    ),
    *(Fault(name, file, old, new, named, ALONE, also="own") for name, file, old, new, named in OWN_LIFE),
    *(
        Fault(name, file, old, new, named, ALONE, ("averaged",), "averaged weights", also="own")
        for name, file, old, new, named in AVERAGED
    ),
    *(
        Fault(name, file, old, new, ("tensors received",), "", jobs, "rows that are read so", also="own")
        for name, file, old, new, jobs in READ
    ),
    Fault(
        # Not of `tied`: its clipping, which acts at every step, takes such a scale away, and the training is the same.
        "run: a float32 gradient 1 % larger where nothing observes",
        RUN,
        SHARED,
        "return loss * share * (1.0 if self._observer or 'float32' not in str(loss.dtype) else 1.01)",
        ("loss",),
        ALONE,
        ("transformer", "conv"),
        "gradients whose scale no clipping takes away",
        also="own",
    ),
    Fault(
        "fsdp: AdamW's second moments kept in bf16",
        "engines/fsdp.py",
        UPDATED,
        _kept("bfloat16", "exp_avg_sq"),
        ("parameter", "loss"),
        "",
        ADAM,
        "an optimizer's own",
        engine="fsdp",
        also="own",
    ),
    Fault(
        "zero: float32's weight decay dropped",
        "engines/zero.py",
        "        run.register(module, optimizer, scheduler=scheduler)\n",
        _groups("group['weight_decay'] = 0.0"),
        ("parameter", "loss"),
        "",
        ("tied", "conv"),
        "a weight decay",
        engine="zero",
        also="own",
    ),
)
