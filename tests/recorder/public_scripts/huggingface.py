"""huggingface/accelerate's examples."""

from __future__ import annotations

import random
from pathlib import Path

from recorder.public_scripts.case import Case, Plant, plant, words

AT = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
GLUE = ("datasets", "evaluate")
OBJECTS = ("model", "optimizer", "train_dataloader", "eval_dataloader", "lr_scheduler")
ALL = ", ".join(OBJECTS)
PREPARE = f"    {ALL} = accelerator.prepare(\n        {ALL}\n    )\n"


def prepared(*left_out: str) -> str:
    """Returns the preparation without some of its objects."""
    names = [name for name in OBJECTS if name not in left_out]
    return f"    {', '.join(names)} = accelerator.prepare({', '.join(names)})\n"


def pets(folder: Path) -> None:
    from PIL import Image

    (folder / "pets").mkdir()
    draw = random.Random(1)
    for number in range(240):
        name = f"{('cat', 'dog')[number % 2]}_{number}.jpg"
        Image.frombytes("RGB", (8, 8), draw.randbytes(192)).save(folder / "pets" / name)


COMMON = (
    plant("loader not prepared", PREPARE, prepared("train_dataloader"), "rows", "rows_not_shared_out"),
    plant("model not prepared", PREPARE, prepared("model"), "gradient", "ranks_never_reduce_gradients"),
    plant("gradients never cleared", "optimizer.zero_grad()", "pass", "gradient", "gradients_never_cleared"),
    plant(
        "loss divided by the ranks",
        "accelerator.backward(loss)",
        "accelerator.backward(loss / accelerator.num_processes)",
        "loss weight",
        "loss_divided_by_ranks",
    ),
)
RATE = plant("rate by rank", "lr=lr)", "lr=lr * (1 + accelerator.process_index))", "rate", "rates_differ_between_ranks")
TWICE = plant(
    "schedule advanced twice",
    "lr_scheduler.step()\n",
    "lr_scheduler.step(); lr_scheduler.step()\n",
    "schedule",
    "schedule_advances_several_times",
)


def case(name: str, *arguments: str, plants: tuple[Plant, ...] = (*COMMON, RATE)) -> Case:
    script = f"examples/{name}.py"
    return Case(
        f"accelerate {Path(name).name}",
        *AT,
        script,
        ("--cpu", *arguments),
        folder="examples",
        before=("hub",),
        packages=GLUE,
        plants=plants,
    )


ACCUMULATION = (
    plant(
        "divided by hand, too",
        "loss = output.loss",
        "loss = output.loss / 3",
        "loss weight",
        "losses_divided_by_accumulation_twice",
    ),
    plant(
        "clipped at each micro-batch",
        "                accelerator.backward(loss)\n",
        "                accelerator.backward(loss)\n"
        "                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n",
        "gradient",
        "clipped_before_last_micro_batch",
    ),
)
PETS = Case(
    "accelerate cv_example",
    *AT,
    "examples/cv_example.py",
    ("--cpu", "--data_dir", "pets"),
    folder="examples",
    before=("hub",),
    packages=("torchvision", "timm"),
    prepare=pets,
    plants=(*COMMON, TWICE),
)


def tiny_model(folder: Path) -> None:
    """Saves a small Llama and a tokenizer of words, which transformers reads from the folder "tiny"."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "tiny")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, pad_token_id=0, **small)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "tiny")


PREPARED = ("transformers.models.auto.processing_auto", "transformers.trainer")  # before they find stand-ins
TRAIN = "    # Train the model\n"


def before_training(name: str, line: str, question: str, cause: str) -> Plant:
    return plant(name, TRAIN, f"    {line}\n{TRAIN}", question, cause)


def trl(name: str, *arguments: str) -> Case:
    common = "--model_name_or_path tiny --output_dir out --use_cpu --bf16 false --report_to none --max_length 32"
    common += " --per_device_train_batch_size 4 --num_train_epochs 2 --gradient_checkpointing false"
    made = f"    # Initialize the {name.upper()} trainer\n"
    loader = (
        "__import__('torch').utils.data.DataLoader(trainer.train_dataset, 4, True, collate_fn=trainer.data_collator)"
    )
    return Case(
        f"TRL {name}",
        "huggingface/trl",
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        f"trl/scripts/{name}.py",
        (*words(common), *arguments),
        module=f"trl.scripts.{name}",
        parts=("trl", "VERSION"),
        before=PREPARED,
        packages=("datasets", "pyarrow"),
        prepare=tiny_model,
        plants=(
            plant(
                "rate by rank",
                made,
                f"    training_args.learning_rate *= 1 + training_args.process_index\n{made}",
                "rate",
                "rates_differ_between_ranks",
            ),
            before_training(
                "loader not prepared",
                f"trainer.get_train_dataloader = lambda: {loader}",
                "rows",
                "rows_not_shared_out",
            ),
            before_training(
                "loss times the ranks",
                "compute = trainer.compute_loss; trainer.compute_loss = lambda *a, **k: 2 * compute(*a, **k)",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            before_training(
                "model not prepared",
                "trainer.accelerator.prepare_model = lambda model, *_, **__: model",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
        ),
    )


CASES = (
    case("nlp_example"),
    PETS,
    case("complete_nlp_example", plants=(*COMMON, RATE, TWICE)),
    case("by_feature/gradient_accumulation", "--gradient_accumulation_steps", "3", plants=(*COMMON, *ACCUMULATION)),
    case("by_feature/checkpointing"),
    case("by_feature/early_stopping"),
    case("by_feature/multi_process_metrics"),
    case("by_feature/ddp_comm_hook"),
    trl("sft", "--dataset_name", "texts", "--gradient_accumulation_steps", "2"),
    trl("dpo", "--dataset_name", "preferences", "--gradient_accumulation_steps", "1"),
)
