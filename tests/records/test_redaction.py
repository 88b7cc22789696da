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
]
KEEPS = [
    "samestep run my_job.py:job --set tokenizer=gpt2 --set max_tokens=512 --nproc 2",
    "train.py --tokens 128 --monkey=1 --keys-per-row 2 --passes 3",
    "train.py --url https://host:8080/x?page=1 --mail a@b.c git@host:repo",
    "sh -c 'python train.py --lr 0.1; echo key'",
    "train.py --token --epochs 2",
    "python -c 'd = {1: 2}; print(d[1])'",
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


@pytest.mark.parametrize("begin", ["ghr_", "npm_", "hvs.", "AIza", "xoxe.", "eyJhbGci.eyJzdWIi."])
def test_tokens_of_services_and_of_the_web_are_hidden(begin: str) -> None:
    assert redacted(["x", f"--note={begin}{'a' * 34}"]) == ["x", "--note=***"]


def test_a_known_services_token_is_hidden_under_any_name() -> None:
    assert redacted(["x", "--note", f"hf_{'a' * 34}"]) == ["x", "--note", "***"]
    assert redacted_values({"lr": "0.1", "api_key": "x"}) == {"lr": "0.1", "api_key": "***"}
