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
LAST |= {"oauth", "creds", "passkey", "passwords", "cookies"}
ANYWHERE = {"secret", "password", "passwd", "passphrase"}  # as in password_file, PGPASSWORD
# A token or a key of such a thing is a secret in the plural, too, and in one word with it: api_keys, hfkey, authtokens.
OF_SECRETS = """access admin anthropic api app auth aws azure bearer bot client encryption gcp gh git github gitlab
google hf hub huggingface jwt license login nvidia oauth openai personal private refresh secret service signing ssh
wandb"""
HOLDERS = frozenset(OF_SECRETS.split())
# A token of a text and a key of a table are no secrets: pad_token, subtoken, sort_key.
OF_TEXTS = """bos cls eos mask pad sep sos special stop unk de next pre sub column feature foreign image input label
output primary sort target"""
INNOCENT = frozenset(OF_TEXTS.split())
# How the tokens of services begin.
SERVICES = r"""github_pat_ gl(?:pat|rt|dt|cbt|ptt)- xox[abeprs][.-] xapp-\d- AIza GOCSPX- ya29\. pypi-AgE
dckr_(?:pat|oat)_ hvs\. wandb_v1_ nvapi- tgp_v1_ pcsk_ ATATT3 lsv2_[ps][tk]_ SG\. shp(?:at|ca|ss)_ glsa_
sntry[su]_ tskey- dp\.[a-z]+\. ops_eyJ"""
# A name may begin so, as hf_finetuned_model: what follows is one run of letters and digits, as no words are.
SHORT = """hf_ api_org_ gh[oprsu]_ npm_ sk-(?:[A-Za-z0-9_-]{0,99}[_-])? csk- [rs]k_(?:live|test)_ whsec_ gsk_ xai- pplx-
r8_ fw_ rpa_ phx_ jina_ lin_api_ ntn_ figd_ pul- key- do[opr]_v1_ rubygems_ dapi dose dkea"""
AWS = "(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"
FORMS = (
    rf"(?:{'|'.join(SERVICES.split())})[A-Za-z0-9_-]{{16,}}(?:\.[A-Za-z0-9_-]{{16,}})?",
    rf"(?:{'|'.join(SHORT.split())})[A-Za-z0-9]{{20,}}(?:-\d)?",
    rf"{AWS}\b",
    # A JSON web token.
    r"eyJ[\w-]+\.eyJ[\w-]+\.[\w-]*",
)
TOKEN = re.compile(rf"\b(?:{'|'.join(FORMS)})")
PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL)
BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}")
SIGNED = re.compile(r"(?i)(?<=[?&]sig=)[^\s&]+|(?<=hooks\.slack\.com/services/)[^\s&]+")  # of an address
USER = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]*@")  # https://user:password@host
ALONE = re.compile(r"(?<=https://)[^/\s:@]+@|(?<=http://)[^/\s:@]+@")  # https://token@host
# A name that may be of a secret: is_secret decides.
NAME = rf"(?P<name>(?=[\w.-]*(?:{'|'.join(sorted(LAST))}))[A-Za-z][\w.-]*)"
# Several are in quotes, in brackets, or with commas between them; after a comma there may be the next name instead.
VALUE = r"""(?P<value>"[^"]*"|'[^']*'|\[[^\]]*\]|(?:[^\s&;,}]|,(?!\s|["']?[\w.-]+["']?\s?[=:]))+)"""
ASSIGNED = re.compile(rf"""(?i)(?<![\w.-])(?P<head>-{{0,2}}{NAME}["']?\s?[=:]\s?){VALUE}""")
FOLLOWS = re.compile(rf"(?i)(?<!\S)(?P<head>--?{NAME}\s+)(?!--){VALUE}(?P<more>(?:\s+(?!-)[^\s;]+)*)")
HEADER = re.compile(r"(?i)((?:proxy-)?authorization\s*:\s*).*")


def is_secret(name: str) -> bool:
    """Returns whether a name of an option, a setting or a variable says that its value is a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # apiKey
    words = re.split(r"[\W_]+", re.sub(r"[\W_]*\d*$", "", spaced.lower()))  # api_key_2 is an api_key
    last, holder = words[-1], "".join(words[-2:-1])
    if last in LAST:
        return not (last in ("key", "token") and holder in INNOCENT)
    if any(secret in word for word in words for secret in ANYWHERE):
        return True
    if joined := re.fullmatch(r"(\w*?)(?:key|token)(s?)", last):
        is_own_token = bool(joined[1]) and last.endswith("token") and joined[1] not in INNOCENT
        return is_own_token or (joined[1] or holder) in HOLDERS
    return False


def redacted_text(text: str) -> str:
    """Returns a text, such as a line for a shell, with *** in place of secrets."""
    text = BEARER.sub(rf"\1{HIDDEN}", HEADER.sub(rf"\1{HIDDEN}", PRIVATE.sub(HIDDEN, text)))
    text = ASSIGNED.sub(lambda found: found["head"] + HIDDEN if is_secret(found["name"]) else found[0], text)
    text = FOLLOWS.sub(_hidden_values, text)
    text = USER.sub(rf"\1:{HIDDEN}@", text)
    return TOKEN.sub(HIDDEN, SIGNED.sub(HIDDEN, ALONE.sub(f"{HIDDEN}@", text)))


def _hidden_values(found: re.Match[str]) -> str:
    """Returns an option and its value, or its values where it is of several, with *** in place of secrets."""
    if not is_secret(found["name"]):
        return found[0]
    return f"{found['head']}{HIDDEN}" + (HIDDEN if found["more"] and _is_of_several(found["name"]) else found["more"])


def _is_of_several(name: str) -> bool:
    return name.lower().endswith(("keys", "tokens", "secrets", "passwords"))


def redacted(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with *** in place of secrets."""
    safe_words: list[str] = []
    # The option whose values these are; '' where the next word is none.
    option = ""
    for word in words:
        name, assigns, value = word.partition("=")
        if option and not word.startswith("--"):
            safe_words.append(HIDDEN)
            option = option if _is_of_several(option) else ""
            continue
        option = word if word.startswith("-") and not assigns and is_secret(word) else ""
        if assigns and value and re.fullmatch(r"-{0,2}[\w.-]+", name) and is_secret(name):
            safe_words.append(f"{name}={HIDDEN}")  # whatever is in the value
        else:
            safe_words.append(redacted_text(word))
    return safe_words


def redacted_values(values: Mapping[str, str]) -> dict[str, str]:
    """Returns settings or variables with *** in place of secrets."""
    return {name: HIDDEN if is_secret(name) else redacted_text(value) for name, value in values.items()}


def typed_command() -> str:
    """Returns the command line of this process, as a user typed it, for its results: without secrets."""
    return shlex.join(redacted(["samestep", *sys.argv[1:]]))
