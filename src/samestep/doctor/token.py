"""The token of a launch: a secret that its machines share, and prove to each other without sending it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from samestep.errors import UserError
from samestep.message import message

TOKEN = "SAMESTEP_TOKEN"  # environment variable
SHORTEST = 16  # characters: a shorter one could be guessed from a proof
NONCE_BYTES = 16


def new() -> str:
    return secrets.token_hex(16)


def nonce() -> str:
    """Returns a random text that is used once, so that an older proof is worth nothing."""
    return secrets.token_hex(NONCE_BYTES)


def given(env: Mapping[str, str]) -> str:
    """Returns the token of the environment; '' without one. Raises UserError for one that is too short."""
    token = env.get(TOKEN, "")
    if token and len(token) < SHORTEST:
        raise UserError(message("token_is_too_short", variable=TOKEN, characters=len(token), least=SHORTEST))
    return token


def proof(token: str, *parts: str) -> str:
    """Returns a text that only who knows the token can make of these parts, and that does not tell the token."""
    return hmac.new(token.encode(errors="surrogateescape"), "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def proves(said: str, token: str, *parts: str) -> bool:
    """Whether `said` is the proof of these parts."""
    return hmac.compare_digest(said.encode(errors="replace"), proof(token, *parts).encode())
