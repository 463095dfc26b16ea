"""Both peers prove that they know the run secret, before either accepts anything else.

    server -> client   Challenge(protocol, nonce)
    client -> server   Proof(protocol, nonce, role, agent, mac over both nonces, role and agent)
    server -> client   Accepted(mac over both nonces, role and agent) or Rejected(reason)

The secret itself never crosses the wire. Nonces are fresh on both sides, so a recorded proof is worth nothing;
the MACs name the side that made them, so a proof cannot be mirrored; and with TLS they cover the certificate's
fingerprint, so a man in the middle with a certificate of his own cannot pass them on. The role says what the client is:
an agent, or a control client (`control_messages`). Pure functions and messages: `channel` does the I/O.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets

import msgspec

from holdfast.wire.messages import PROTOCOL

__all__ = [
    "MAX_HANDSHAKE_FRAME_BYTES",
    "Accepted",
    "Challenge",
    "Proof",
    "Rejected",
    "Role",
    "check_accepted",
    "check_proof",
    "make_challenge",
    "make_token",
    "prove",
]

MAX_HANDSHAKE_FRAME_BYTES = 4096
"""A stranger may make us hold no more than this."""

_NONCE_BYTES = 32


class Role(enum.StrEnum):
    """What a client is, which decides what messages it may send."""

    AGENT = "agent"
    CONTROL = "control client"


class _Handshake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Not part of `messages`: nobody but `channel` ever sees these."""


class Challenge(_Handshake, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes


class Proof(_Handshake, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes
    role: Role = Role.AGENT
    agent: str = ""
    """The agent's name; a control client has none."""
    mac: bytes


class Accepted(_Handshake, frozen=True, kw_only=True):
    mac: bytes


class Rejected(_Handshake, frozen=True, kw_only=True):
    reason: str


def make_token() -> str:
    """A fresh shared secret for one run, as text that fits into an environment variable."""
    return secrets.token_urlsafe(32)


def make_challenge() -> Challenge:
    return Challenge(protocol=PROTOCOL, nonce=secrets.token_bytes(_NONCE_BYTES))


def prove(challenge: Challenge, token: str, fingerprint: str, agent: str, role: Role = Role.AGENT) -> Proof:
    """The client's answer; `fingerprint` is the certificate that it sees, or "" without TLS."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mac = _mac(token, b"client", challenge.nonce, nonce, fingerprint, role, agent)
    return Proof(protocol=PROTOCOL, nonce=nonce, role=role, agent=agent, mac=mac)


def check_proof(challenge: Challenge, proof: Proof, token: str, fingerprint: str) -> Accepted | Rejected:
    """The server's verdict. The protocol comes first: it needs no secret, and its reason is the more useful one."""
    if proof.protocol != PROTOCOL:
        return Rejected(
            reason=f"This controller speaks protocol {PROTOCOL} and the {proof.role} protocol {proof.protocol}:"
            " install the same version of holdfast on both."
        )
    expected = _mac(token, b"client", challenge.nonce, proof.nonce, fingerprint, proof.role, proof.agent)
    if len(proof.nonce) != _NONCE_BYTES or not hmac.compare_digest(expected, proof.mac):
        return Rejected(
            reason=f"The {proof.role}'s token is not this run's: start it with the token that the run gave out."
        )
    return Accepted(mac=_mac(token, b"server", challenge.nonce, proof.nonce, fingerprint, proof.role, proof.agent))


def check_accepted(challenge: Challenge, proof: Proof, accepted: Accepted, token: str, fingerprint: str) -> bool:
    """Whether the server knows the run secret too."""
    expected = _mac(token, b"server", challenge.nonce, proof.nonce, fingerprint, proof.role, proof.agent)
    return hmac.compare_digest(expected, accepted.mac)


def _mac(
    token: str, side: bytes, server_nonce: bytes, client_nonce: bytes, fingerprint: str, role: Role, agent: str
) -> bytes:
    parts = [b"holdfast", side, server_nonce, client_nonce, fingerprint.encode(), role.encode(), agent.encode()]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
