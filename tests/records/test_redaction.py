"""Secrets of a command line are not written down; what only looks like one is."""

from __future__ import annotations

import shlex

import pytest

from samestep.records.redaction import redacted, redacted_text, redacted_values

SECRET = "s3cr3t/Value+1"
HIDES = [
    "train.py --token={}",
    "train.py --token {}",
    "train.py --api-key {} --epochs 2",
    "train.py --hf_token={}",
    "train.py --set api_key={}",
    "train.py --apiKey={}",
    "env WANDB_API_KEY={} python train.py",
    "env AWS_SECRET_ACCESS_KEY={} DB_PASSWORD={} x",
    "env DB_PASSWORD_OF_TEAM={} x",
    "sh -c 'HF_TOKEN={} python train.py --password {} --epochs 2'",
    "sh -c 'export HF_TOKEN=\"{} more\"; python train.py'",
    "curl https://user:{}@host/x",
    "git clone https://{}@host/x",
    "curl 'https://host/x?token={}&page=1'",
    "curl -H 'Authorization: Bearer {}' https://host",
    """train.py --config '{{"api_key": "{}", "lr": 0.1}}'""",
    "train.py --password 'with space {}'",
    "train.py --password -{}",
    "env PGPASSWORD={} psql",
    "train.py --set api_key_2={} --bearer {}",
    "curl -H 'X-Auth: Bearer {}' https://host",
    "curl 'https://host/x?X-Amz-Signature={}&page=1'",
    "curl 'https://host/x?sv=1&sig={}'",
    "train.py --api-keys {} --epochs 2",
    "train.py --api_keys {} {} --epochs 2",
    "train.py --api-keys={},{} --epochs 2",
    "train.py --access-tokens '{}' --apikeys {}",
    "train.py --hftoken {} --epochs 2",
    "train.py --authtoken={} --comettoken {}",
    "train.py --hfToken {} --wandbkey {}",
    "env OPENAI_API_KEYS={},{} x",
    "env NGROK_AUTHTOKEN={} x",
    """train.py --config '{{"api_keys": ["{}", "{}"], "lr": 0.1}}'""",
    "train.py --password a,{}",
]
KEEPS = [
    "samestep run my_job.py:job --set tokenizer=gpt2 --set max_tokens=512 --nproc 2",
    "train.py --tokens 128 --monkey=1 --keys-per-row 2 --passes 3",
    "train.py --url https://host:8080/x?page=1 --mail a@b.c git@host:repo",
    "sh -c 'python train.py --lr 0.1; echo key'",
    "train.py --token --epochs 2",
    "python -c 'd = {1: 2}; print(d[1])'",
    "train.py --tokenizer gpt2 --max-tokens 512 --num-keys 8 --key-dim 64 --author me --authors=a,b",
    "train.py --pad-token '<pad>' --eos_token=x --sort-key name --label-key y --subtoken 3 --special-tokens a b",
    "train.py --tokens-per-batch 4096 --keyword x --turkey 1 --hotkeys a --session-keys a b --token-path a.txt",
    "python train.py --out runs/sk-learn-baseline-with-many-features-2024 --data data/ASIA-pacific-2020-images-large",
    "python train.py r8_resnet50_baseline_of_march_2024 fw_bw_overlap_of_every_layer_2024 dapple-dataset-of-2024",
    "python train.py --id ASIAN_LANGUAGES_CORPUS_2024 hf_models/meta/llama SG.png key-value-store-of-2024",
    "python train.py hf_finetuned_model_of_llama_3 jina_embeddings_v2_base_en pypi-mirror-of-our-company sk_test_a",
]


@pytest.mark.parametrize("line", HIDES)
def test_a_secret_is_hidden(line: str) -> None:
    secret = SECRET.replace("/", "") if "://" in line else SECRET
    typed = line.format(secret, secret)
    for shown in (shlex.join(redacted(shlex.split(typed))), redacted_text(typed)):
        assert secret not in shown and "***" in shown, shown
    shown = redacted(shlex.split(typed))
    assert len(shown) == len(shlex.split(typed))  # the other words stay
    assert {"--epochs", "2"} <= {*shown} or "--epochs 2" not in line or "sh -c" in line


@pytest.mark.parametrize("line", KEEPS)
def test_what_is_no_secret_stays(line: str) -> None:
    assert redacted(shlex.split(line)) == shlex.split(line)


BEGINS = "ghr_ npm_ hvs. AIza xoxe. eyJhbGci.eyJzdWIi. nvapi- sk_live_ rk_test_ r8_ gsk_ xai- pplx- sk- sk-ant-api03-"
BEGINS += " sk-proj- glrt- lsv2_pt_ dop_v1_ GOCSPX- SG. whsec_ pcsk_ fw_ rpa_ pul- dapi hf_ api_org_"


@pytest.mark.parametrize("begin", BEGINS.split())
def test_tokens_of_services_and_of_the_web_are_hidden(begin: str) -> None:
    assert redacted(["x", f"--note={begin}{'a' * 34}"]) == ["x", "--note=***"]
    assert redacted_text(f"got {begin}{'b3' * 17}, then") == "got ***, then"


@pytest.mark.parametrize("begin", ["AKIA", "ASIA"])
def test_a_key_of_amazon_is_hidden(begin: str) -> None:
    assert redacted(["x", f"{begin}IOSFODNN7EXAMPLE"]) == ["x", "***"]


def test_a_private_key_is_hidden() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----"
    assert redacted_text(f"key {key} end") == "key *** end" and redacted_text(key[:40]) == "***"


def test_a_known_services_token_is_hidden_under_any_name() -> None:
    assert redacted(["x", "--note", f"hf_{'a' * 34}"]) == ["x", "--note", "***"]
    assert redacted_values({"lr": "0.1", "api_key": "x"}) == {"lr": "0.1", "api_key": "***"}
