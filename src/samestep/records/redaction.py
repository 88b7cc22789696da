"""Replaces secrets in command lines by ***, before they are written to a file that others may read.

A secret is the value of a name that says so, as --api-key VALUE, HF_TOKEN=VALUE or "password": "VALUE" do; a password
in an address; or a text that looks like a known service's token.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

HIDDEN = "***"
# The last word of a name: an_api_key and AWS_SECRET_ACCESS_KEY, but not tokenizer, max_tokens or monkey.
LAST = {"key", "apikey", "token", "pat", "secret", "password", "passwd", "pwd", "pass", "passphrase", "credential"}
LAST |= {"credentials", "secrets", "auth", "authorization", "cookie", "bearer", "jwt", "passcode", "signature"}
ANYWHERE = {"secret", "password", "passwd", "passphrase"}  # as in password_file, PGPASSWORD
SERVICES = "hf_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abeprs][.-]|AKIA|AIza|pypi-|npm_|dckr_pat_|hvs\\.|wandb_v1_"
TOKEN = re.compile(rf"\b({SERVICES})[A-Za-z0-9_-]{{16,}}|\beyJ[\w-]+\.eyJ[\w-]+\.[\w-]*")  # the last: a JSON web token
BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}")
SIGNED = re.compile(r"(?i)(?<=[?&]sig=)[^\s&]+")  # of an address
USER = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]*@")  # https://user:password@host
ALONE = re.compile(r"(?<=https://)[^/\s:@]+@|(?<=http://)[^/\s:@]+@")  # https://token@host
NAME = rf"(?P<name>(?=[\w.-]*(?:{'|'.join(sorted(LAST))}))[A-Za-z][\w.-]*)"  # that may be one: is_secret decides
VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s&;,}]+)"""
ASSIGNED = re.compile(rf"""(?i)(?<![\w.-])(?P<head>-{{0,2}}{NAME}["']?\s?[=:]\s?){VALUE}""")
FOLLOWS = re.compile(rf"(?i)(?<!\S)(?P<head>--?{NAME}\s+)(?!--){VALUE}")
HEADER = re.compile(r"(?i)((?:proxy-)?authorization\s*:\s*).*")


def is_secret(name: str) -> bool:
    """Whether a name of an option, a setting or a variable says that its value is a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # apiKey
    words = re.split(r"[\W_]+", re.sub(r"[\W_]*\d*$", "", spaced.lower()))  # api_key_2 is an api_key
    return words[-1] in LAST or any(secret in word for word in words for secret in ANYWHERE)


def redacted_text(text: str) -> str:
    """Returns a text, such as a line for a shell, with *** in place of secrets."""
    text = BEARER.sub(rf"\1{HIDDEN}", HEADER.sub(rf"\1{HIDDEN}", text))
    for pattern in (ASSIGNED, FOLLOWS):
        text = pattern.sub(lambda found: found["head"] + HIDDEN if is_secret(found["name"]) else found[0], text)
    text = USER.sub(rf"\1:{HIDDEN}@", text)
    return TOKEN.sub(HIDDEN, SIGNED.sub(HIDDEN, ALONE.sub(f"{HIDDEN}@", text)))


def redacted(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with *** in place of secrets."""
    safe_words: list[str] = []
    for before, word in zip(["", *words], words):
        name, assigns, value = word.partition("=")
        follows = before.startswith("-") and "=" not in before and is_secret(before) and not word.startswith("--")
        if follows:
            safe_words.append(HIDDEN)
        elif assigns and value and re.fullmatch(r"-{0,2}[\w.-]+", name) and is_secret(name):
            safe_words.append(f"{name}={HIDDEN}")  # whatever the value holds
        else:
            safe_words.append(redacted_text(word))
    return safe_words


def redacted_values(values: Mapping[str, str]) -> dict[str, str]:
    """Returns settings or variables with *** in place of secrets."""
    return {name: HIDDEN if is_secret(name) else redacted_text(value) for name, value in values.items()}


def typed_command() -> str:
    """Returns the command line of this process, as a user typed it, for its results: without secrets."""
    return shlex.join(redacted(["samestep", *sys.argv[1:]]))
