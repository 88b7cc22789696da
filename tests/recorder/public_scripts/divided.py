"""Public scripts that divide a model over their ranks. benchmarks/public_divided.py checks them."""

from __future__ import annotations

import json
import random
from array import array
from functools import partial
from pathlib import Path

from planting import Edit
from recorder.public_scripts.case import Case, Plant, plant, usual, words

EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
HEIRETSU = ("ChinmayK0607/heiretsu", "bce9fb38a4e104ab77d2365547014d5194a4ae6c", "train.py")
FSDP_TRAINING = ("LinB203/FSDP-Training", "b7a46352bc6a5c1663328575c594de3df336f337")
SCRATCH = ("NotTheStallion/pipeline-parallelism-from-scratch", "dd80250948ac50097c39adfe7dd83638d7aaa7f1")
PICOTRON = ("huggingface/picotron", "59714b1bf25541dbeb6f5a721ed15f6d0768e786", "train.py")
ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
BY_HAND = ("mac-mvak/tensor-parallel", "d7eb236572657fb83b734fd4f21a65f1920d7957")


# pytorch/examples

TENSOR = "distributed/tensor_parallelism"


def example(
    name: str,
    file: str,
    call: str,
    *,
    ranks: int = 2,
    plants: tuple[Plant, ...] = (),
) -> Case:
    """A script of the examples. call: the line of its forward pass."""
    return Case(
        name,
        *EXAMPLES,
        f"{TENSOR}/{file}",
        cwd=TENSOR,
        folder=TENSOR,
        on_gpus=True,
        ranks=ranks,
        edits=(Edit(call, f"    optimizer.zero_grad()\n{call}"),),
        note="its gradients are never cleared: cleared",
        plants=plants,
    )


# ChinmayK0607/heiretsu: one script for data, tensor, pipeline and expert parallelism

SMALL = (
    "--data_dir made --batch_size 4 --block_size 16 --n_layer 2 --n_head 4 --n_embed 32 --dropout 0.0 "
    "--eval_interval 1000 --eval_iters 1 --max_iters 20 --device cpu --dist_backend gloo"
)
PARTS = ("train.py", "gpt_model.py", "pipeline.py", "topo.py", "dp.py", "moe.py", "ep_comm.py", "tp_linear.py")
SUMMED, STEP = "gradients_summed_over_ranks", "            optimizer.step()\n"
ONE_SEED = (Edit("args.seed + topo.tp_rank", "args.seed"),)


def tokens(folder: Path) -> None:
    """Writes files of tokens as that script reads them, in the place of those that it downloads."""
    draws = random.Random(0)
    (folder / "made").mkdir()
    for name in ("train_000000", "train_000001", "val_000000"):
        numbers = array("H", [draws.randrange(96) for _ in range(20_000)])
        (folder / "made" / f"fineweb_{name}.bin").write_bytes(numbers.tobytes())


def heiretsu(
    name: str, arguments: str, *, ranks: int = 2, edits: tuple[Edit, ...] = (), plants: tuple[Plant, ...] = ()
) -> Case:
    return Case(
        f"heiretsu, {name}",
        *HEIRETSU,
        arguments=words(f"{SMALL} {arguments}"),
        parts=PARTS,
        prepare=tokens,
        ranks=ranks,
        edits=edits,
        note="each rank of a replica draws its first weights, also those that it holds whole, with a seed of its own: "
        "one seed"
        if edits
        else "",
        plants=plants,
    )


AVERAGED = "average_gradients(local_module, topo.dp_group)"
OF_HEIRETSU_DATA = (
    usual("not wrapped, one seed", f"        {AVERAGED}\n", ""),
    plant("summed over ranks", "        p.grad.div_(world)", "        pass", "loss weight", SUMMED, "dp.py"),
)
OF_HEIRETSU_TENSOR = (
    plant(
        "not reduced in the backward pass",
        "            dist.all_reduce(grad_output, op=dist.ReduceOp.SUM, group=ctx.tp_group)\n",
        "            pass\n",
        "weights",
        "replica_drifts_apart",
        "tp_linear.py",
    ),
    plant(
        "rows by rank",
        "seed=args.seed, rank=rank_for_data",
        "seed=args.seed, rank=rank",
        "rows",
        "replica_reads_other_rows",
    ),
)
OF_HEIRETSU_PIPELINE = (
    usual("accumulation not divided", "(loss + aux) / micro_batches", "loss + aux", "pipeline.py"),
    plant(
        "micro-batches divided twice",
        "(loss + aux) / micro_batches",
        "(loss + aux) / micro_batches**2",
        "loss weight",
        "losses_divided_by_accumulation_twice",
        "pipeline.py",
    ),
    usual(
        "gradients never cleared", "            optimizer.step()\n        optimizer.zero_grad(set_to_none=True)\n", STEP
    ),
)
OF_HEIRETSU_GRID = (
    plant(
        "replicas of other seeds",
        "args.seed + topo.tp_rank",
        "args.seed + topo.dp_rank",
        "initial weights",
        "ranks_begin_with_different_weights",
    ),
    plant(
        "one stage not reduced over replicas",
        AVERAGED,
        AVERAGED.replace("topo.dp_group", "topo.dp_group if topo.pp_rank else None"),
        "gradient",
        "ranks_never_reduce_gradients",
    ),
)


# huggingface/picotron

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}
MADE = (
    "        draws = np.random.RandomState(0)\n"
    '        self.dataset = [{"input_ids": draws.randint(0, 64, seq_length + 1)} for _ in range(256)]\n'
)
IN, IN_BUCKET = "picotron/data.py", "picotron/data_parallel/bucket.py"
MADE_DATA = (
    Edit("from datasets import Features, Sequence, Value, load_dataset\n", "", IN),
    Edit("        self.dataset = load_dataset(dataset_name, split=split, name=subset_name)\n", MADE, IN),
    Edit("AutoTokenizer.from_pretrained(tokenizer_name)", "None", IN),
    Edit('self.tokenize_dataset(self.dataset, "text", self.seq_length, num_proc)', "self.dataset", IN),
    Edit("base=config.rope_theta", "base=10000.0", "picotron/model.py"),  # which transformers 5 has elsewhere
)
ATTENTION = {"flash_attn_interface": "flash_attn_func", "layers.rotary": "apply_rotary_emb"}
ATTENTION |= {"ops.triton.layer_norm": "layer_norm_fn"}


def tiny(folder: Path, **sizes: object) -> None:
    """Writes the settings, a small model, and the names of flash attention, which no CPU has."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "template/base_config.json").read_text())
    config["distributed"].update({"use_cpu": True, **sizes})
    config["model"].update({"name": "tiny", "use_flash_attention": False, "use_fused_adam": False})
    config["model"].update({key: SIZES[key] for key in config["model"] if key in SIZES})
    config["training"].update({"seq_length": 16, "micro_batch_size": 4, "gradient_accumulation_steps": 2})
    config["training"].update({"num_samples": None})
    config["environment"].update({"FLASH_ATTEN": "0", "HF_TOKEN": "none"})
    (folder / "config.json").write_text(json.dumps(config))
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **SIZES}
    for place in ("tiny", "hf_model/tiny"):
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text(json.dumps(model))
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (32,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (32, 64)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (32, 32) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (16, 32) for name in "kv"}
    (folder / "hf_model_safetensors").mkdir()
    save_file({n: torch.randn(s) for n, s in shapes.items()}, folder / "hf_model_safetensors/model.safetensors")
    for name, function in ATTENTION.items():
        file = (folder / "flash_attn" / name.replace(".", "/")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{function} = None\n")


OWN_SEEDS = (
    Edit(
        'set_all_seed(config["training"]["seed"])',
        'set_all_seed(config["training"]["seed"] + pgm.process_group_manager.tp_rank)',
    ),
)
IN_TENSOR, IN_PIPELINE = (
    "picotron/tensor_parallel/tp_communications.py",
    "picotron/pipeline_parallel/pipeline_parallel.py",
)
OF_LOSS = "F.cross_entropy(output_tensor.flatten(0, 1), batch[\"target_ids\"].to(device).flatten(), reduction='mean')"
AFTER = "\n            nonlocal logging_loss\n            logging_loss += output_tensor.item()"
DIVIDED_LOSS = (Edit(f"{OF_LOSS}{AFTER}", f"{OF_LOSS} / data_loader.grad_acc_steps{AFTER}", IN_PIPELINE),)
ACCUMULATED = "reduction='mean') / data_loader.grad_acc_steps\n"
OF_PICOTRON = (
    usual("accumulation not divided", ACCUMULATED, "reduction='mean')\n"),
    plant(
        "micro-batches divided twice",
        ACCUMULATED,
        "reduction='mean') / data_loader.grad_acc_steps**2\n",
        "loss weight",
        "losses_divided_by_accumulation_twice",
    ),
)
OF_PICOTRON_DATA = (
    *OF_PICOTRON,
    plant(
        "synchronised at the first micro-batch",
        "(i == data_loader.grad_acc_steps - 1)",
        "(i == 0)",
        "updates",
        "gradients_never_reach_the_optimizer",
    ),
    plant(
        "summed over ranks", "        self.grad_data /= self.process_group_size\n", "", "loss weight", SUMMED, IN_BUCKET
    ),
)
SEEDS_NOTE = "each rank of a replica draws the same piece of each layer, with one seed: seeds of their own"
OF_PICOTRON_TENSOR = (
    plant(
        "not reduced in the backward pass",
        "        dist.all_reduce(grad_output, op=dist.ReduceOp.SUM, group=pgm.process_group_manager.tp_group)\n",
        "",
        "weights",
        "replica_drifts_apart",
        IN_TENSOR,
    ),
    plant(
        "summed in a copy",
        "        dist.all_reduce(x, op=dist.ReduceOp.SUM",
        "        dist.all_reduce(x.clone(), op=dist.ReduceOp.SUM",
        "replayed gradient",
        "module_computes_otherwise",
        IN_TENSOR,
    ),
    plant(
        "rows by rank",
        "            num_replicas=pgm.process_group_manager.dp_world_size, \n"
        "            rank=pgm.process_group_manager.dp_rank, \n",
        "            num_replicas=pgm.process_group_manager.tp_world_size,\n"
        "            rank=pgm.process_group_manager.tp_rank,\n",
        "rows",
        "replica_reads_other_rows",
        IN,
    ),
    OF_PICOTRON[1],
)


def picotron(
    name: str,
    *,
    ranks: int = 2,
    edits: tuple[Edit, ...] = (),
    plants: tuple[Plant, ...] = (),
    note: str = "",
    **sizes: object,
) -> Case:
    return Case(
        f"picotron, {name}",
        *PICOTRON,
        words("--config config.json"),
        parts=("train.py", "picotron", "template"),
        on_gpus=True,
        packages=("wandb",),
        prepare=partial(tiny, **sizes),
        sizes=MADE_DATA,
        ranks=ranks,
        edits=edits,
        plants=plants,
        note=note,
    )


# huggingface/accelerate: one script for FSDP2, tensor and context parallelism

NATIVE = "examples/torch_native_parallelism"
MADE_ROWS = (
    "draws = torch.randint(0, 64, (256, args.sequence_length + 1), generator=torch.Generator().manual_seed(0))\n"
    '    dataset = [{"input_ids": row[:-1].tolist(), "shift_labels": row[1:].tolist()} for row in draws]'
)


def llama(folder: Path) -> None:
    """Writes a small model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / NATIVE / "tiny")


def accelerate(name: str, arguments: str, *, ranks: int = 2) -> Case:
    return Case(
        f"accelerate, {name}",
        *ACCELERATE,
        f"{NATIVE}/nd_parallel.py",
        words(f"--model-name ./tiny --num-steps 20 --sequence-length 16 {arguments}"),
        cwd=NATIVE,
        folder=NATIVE,
        on_gpus=True,
        packages=("wandb",),
        prepare=llama,
        sizes=(
            Edit("setup_tokenizer(args.model_name)", "None", f"{NATIVE}/nd_parallel.py"),
            Edit("dataset = get_dataset(tokenizer, args.sequence_length, accelerator)", MADE_ROWS),
            Edit("from datasets import Dataset, load_dataset\n", "Dataset = object\n", f"{NATIVE}/utils.py"),
        ),
        ranks=ranks,
    )


SHORT = "--batch_size 1 --size 12 --seq_len 16"
DIVIDED = (
    example(
        "tensor parallel",
        "tensor_parallel_example.py",
        "    output = tp_model(inp)\n",
        plants=(
            plant(
                "rows by rank",
                "torch.manual_seed(i)",
                "torch.manual_seed(i + 100 * _rank)",
                "rows",
                "replica_reads_other_rows",
            ),
        ),
    ),
    example(
        "sequence parallel",
        "sequence_parallel_example.py",
        "    output = sp_model(inp)\n",
    ),
    example(
        "FSDP and tensor parallel",
        "fsdp_tp_example.py",
        "    output = sharded_model(inp)\n",
        ranks=4,
        on_gpus=True,
    ),
    heiretsu("data", "--dp 2", plants=OF_HEIRETSU_DATA),
    heiretsu("tensor", "--tp 2", edits=ONE_SEED),
    heiretsu("tensor, not clipped", "--tp 2 --grad_clip 0", edits=ONE_SEED, plants=OF_HEIRETSU_TENSOR),
    heiretsu("pipeline", "--pp 2 --grad_accum_steps 2"),
    heiretsu("pipeline, not clipped", "--pp 2 --grad_accum_steps 2 --grad_clip 0", plants=OF_HEIRETSU_PIPELINE),
    heiretsu("experts", "--ep 2 --num_experts 4 --moe_freq 1"),
    heiretsu("data and experts", "--dp 2 --num_experts 4 --moe_freq 1"),
    heiretsu("data and divided experts", "--dp 2 --ep 2 --num_experts 4 --moe_freq 1", ranks=4),
    heiretsu("data and tensor", "--dp 2 --tp 2", ranks=4, edits=ONE_SEED),
    heiretsu("tensor and pipeline", "--tp 2 --pp 2 --grad_accum_steps 2", ranks=4),
    heiretsu("data and pipeline", "--dp 2 --pp 2 --grad_accum_steps 2", ranks=4),
    heiretsu(
        "data and pipeline, not clipped",
        "--dp 2 --pp 2 --grad_accum_steps 2 --grad_clip 0",
        ranks=4,
        plants=OF_HEIRETSU_GRID,
    ),
    picotron("data", dp_size=2, plants=OF_PICOTRON_DATA),
    picotron("tensor", tp_size=2, edits=OWN_SEEDS, plants=OF_PICOTRON_TENSOR, note=SEEDS_NOTE),
    picotron("data and tensor", tp_size=2, dp_size=2, ranks=4, edits=OWN_SEEDS, note=SEEDS_NOTE),
    picotron(
        "pipeline", pp_size=2, edits=DIVIDED_LOSS, note="its pipelines divide no loss by the micro-batches: divided"
    ),
    picotron("pipeline, all forward first", pp_size=2, pp_engine="afab"),
    picotron("data and pipeline", pp_size=2, dp_size=2, ranks=4),
    picotron("tensor and pipeline", pp_size=2, tp_size=2, ranks=4),
    picotron("context", cp_size=2),
    picotron("data and context", cp_size=2, dp_size=2, ranks=4),
    accelerate("shards", "--dp-shard-size 2"),
    accelerate("tensor", "--tp-size 2"),
    accelerate("shards and tensor", "--dp-shard-size 2 --tp-size 2", ranks=4),
    accelerate("replicas of shards", "--dp-shard-size 2 --dp-replicate-size 2", ranks=4),
    Case(
        "FSDP-Training, fsdp",
        *FSDP_TRAINING,
        "train_fsdp.py",
        words(SHORT),
        on_gpus=True,
        parts=("train_fsdp.py", "models", "utils"),
    ),
    Case(
        "FSDP-Training, tensor and fsdp",
        *FSDP_TRAINING,
        "train_sp_tp_fsdp.py",
        words(f"{SHORT} --tp_size 2"),
        on_gpus=True,
        parts=("train_sp_tp_fsdp.py", "models", "utils"),
        ranks=4,
    ),
    Case("pipeline from scratch, gpipe", *SCRATCH, "gpipe.py", parts=("gpipe.py", "src")),
    Case(
        "tensor parallel by hand",
        *BY_HAND,
        "distr_model.py",
        words("-b 8 -s 2"),
        sizes=(
            Edit("torch.device(rank)", 'torch.device("cpu")'),
            Edit("    if rank == size - 1:\n        logger = wandb", "    if False:\n        logger = wandb"),
        ),
        on_gpus=True,
        packages=("torchvision", "wandb"),
        parts=("distr_model.py", "loops.py", "model_shards.py", "gathers.py"),
    ),
)
