"""The healthy twins: each script, with the arguments and the number of recorded steps of each variant."""

from __future__ import annotations

from corpus.twin import Healthy, Twin

VARIANTS: dict[str, tuple[str, ...]] = {
    "ddp_classifier": ("", "--optimizer adamw", "--workers 2", "--smoothing 0.1", "--look-first"),
    "grad_accumulation": ("", "--accumulate 2", "--sync-always"),
    "mae_pretrain": ("", "--accum_iter 1", "--bf16"),
    "moco": ("", "--momentum 0.5", "--shuffle"),
    "dino": ("", "--clip_grad 0", "--drop_path 0"),
    "clip_contrastive": ("", "--local-loss"),
    "simclr": ("",),
    "dpo": ("", "--label_smoothing 0.1", "--accumulate 2"),
    "adaptive_dpo": ("", "--optimizer AdamW"),
    "reward_model": ("", "--two-forwards"),
    "nanogpt": ("", "--scaler", "--dropout 0.1", "--gradient_accumulation_steps 8"),
    "vicreg": ("", "--norm", "--norm --dropout 0.2"),
    "batch_objects": ("", "--kind dataclass", "--kind namedtuple"),
    "drawn_batches": ("", "--draw numpy --dropout 0.1", "--accumulate 4"),
    "build_nanogpt": ("", "--micro 1", "--micro 4"),
    "nanochat": ("", "--accumulate 2", "--whole"),
    "minimind": ("", "--accumulation_steps 1", "--dtype bfloat16"),
    "token_mean": ("", "--optimizer Adam"),
    "cleanrl_ppo": ("", "--target-kl 0.0074"),
    "dqn": ("", "--tau 0.1 --target-every 1"),
    "by_hand": ("", "--clip each", "--clip whole", "--asynchronous"),
    "gan": ("", "--critic-steps 2", "--optimizer SGD"),
    "vae": ("", "--reduction mean"),
    "diffusion": ("", "--accumulate 2"),
    "iterable": ("", "--workers 0", "--noise"),
    "worker_noise": ("", "--workers 0"),
    "evaluate_files": ("", "--held-out 36"),
    "early_stopping": ("", "--plateau"),
    "muon_and_adam": ("", "--warmup 5", "--warmup 20"),
    "frozen_backbone": ("", "--eval-mode", "--unfreeze-last"),
    "bf16": ("", "--pure"),
    "scaler_skips": ("", "--init-scale 1024", "--clip 0.5"),
    "processes": ("",),
    "spawned": ("", "--global-batch-size 32"),
    "project/tools/train": ("", "--width 8"),
    "baseline_first": ("", "--baseline-steps 3"),
    "detection": ("", "--optimizer AdamW"),
    "lora": ("", "--optimizer SGD"),
    "mean_teacher": ("", "--accumulate 2"),
    "branches": ("", "--zero"),
    "normalised_inputs": ("", "--batches"),
    "nan_guard": ("", "--broken-row 5"),
    "epoch_loader": ("", "--workers 1"),
    "mixup": ("",),
    "byol": ("", "--coefficient 1", "--tau 0.9999"),
    "own_checkpoints": ("", "--weight 0.5", "--every 3"),
    "tied_weights": ("", "--optimizer SGD"),
    "launcher_variables": ("",),
    "gradient_edits": ("", "--edit sign", "--edit centralize", "--edit decay", "--edit trust"),
    "tensor_parallel": (
        "",
        "--sequence-parallel --loss-parallel",
        "--sequence-parallel --clip 0.1",
        "--loss-parallel --clip 0.1",
        "--clip 0.1 --accumulate 2",
        "--dropout 0.1",
        "--optimizer AdamW",
        "--tied",
    ),
    "fsdp_tensor": (
        "",
        "--clip 0.1",
        "--accumulate 2",
        "--dropout 0.1",
        "--dropout 0.1 --optimizer AdamW",
        "--by-hand",
        "--by-hand --optimizer AdamW",
    ),
    "transformers_plan": (
        "",
        "--tied --accumulate 2",
        "--clip 0.1",
        "--config --model qwen3",
        "--config",
        "--model qwen3_moe",
        "--config --fsdp 2",
        "--config --fsdp 2 --clip 0.1",
    ),
    "megatron_layers": (
        "",
        "--tp 4",
        "--clip 0.3",
        "--accumulate 2",
        "--optimizer AdamW",
        "--dropout 0.1",
        "--clip 0.3 --accumulate 2",
    ),
    "process_groups": ("", "--clip 0.3", "--accumulate 2", "--optimizer AdamW", "--tp 4 --dp 1"),
    "expert_layers": ("", "--local", "--optimizer AdamW"),
    "context_layers": ("", "--how ulysses", "--clip 0.3", "--how ulysses --clip 0.3", "--optimizer AdamW"),
    "hybrid_shards": ("", "--clip 0.1", "--dropout 0.1", "--clip 0.1 --optimizer AdamW"),
    "pipeline": (
        "",
        "--schedule GPipe",
        "--schedule Interleaved1F1B --tied",
        "--schedule LoopedBFS",
        "--schedule InterleavedZeroBubble",
        "--schedule ZBVZeroBubble --clip 0.3",
        "--schedule DualPipeV",
        "--schedule ZBVZeroBubble --tied --clip 0.3",
        "--schedule InterleavedZeroBubble --dropout 0.1",
        "--tied",
        "--clip 0.3",
        "--tied --clip 0.3",
        "--dropout 0.1 --micro 2",
        "--optimizer AdamW",
    ),
    "traced_pipeline": (
        "",
        "--skip",
        "--tied",
        "--clip 0.3",
        "--dropout 0.1 --micro 2",
        "--schedule Interleaved1F1B --tied",
        "--schedule Interleaved1F1B",
    ),
    "pipeline_replicas": ("", "--ddp", "--gpipe", "--clip 0.1", "--ddp --optimizer AdamW"),
    "stages_by_hand": ("", "--parts 1", "--clip 0.1", "--clip 0.1 --optimizer AdamW"),
}
# Where two do not show the layout.
RANKS = {"pipeline_replicas": 4, "stages_by_hand": 4, "megatron_layers": 4, "fsdp_tensor": 4, "hybrid_shards": 4}
RANKS |= {"process_groups": 4, "traced_pipeline": 4}
# What a training shows late takes more steps than the command's usual 8.
STEPS = {"early_stopping": 40}


def ranks_of(twin: Twin, nproc: int = 2) -> int:
    """Returns on how many ranks a twin is checked."""
    return 4 if "--fsdp 2" in twin.arguments else RANKS.get(twin.script, nproc)


STARTS_RANKS_ITSELF = ("processes", "spawned")
HEALTHY = tuple(Healthy(script, arguments) for script, variants in VARIANTS.items() for arguments in variants)
