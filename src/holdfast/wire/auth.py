"""Both peers prove that they know the run secret, before either accepts anything else.

    server -> client   Challenge(protocol, nonce)
    client -> server   Proof(protocol, nonce, hello, mac over both nonces and the hello)
    server -> client   Accepted(mac over both nonces and the hello) or Rejected(reason)

The secret itself never crosses the wire. Nonces are fresh on both sides, so a recorded proof is worth nothing;
the MACs name the side that made them, so a proof cannot be mirrored; and with TLS they cover the certificate's
fingerprint, so a man in the middle with a certificate of his own cannot pass them on. The hello says what the client
is: an agent, or a control client (`control_messages`). Pure functions and messages: `channel` does the I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from holdfast.wire.hello import Hello
from holdfast.wire.messages import PROTOCOL

__all__ = [
    "MAX_HANDSHAKE_FRAME_BYTES",
    "Accepted",
    "Challenge",
    "Proof",
    "Rejected",
    "check_accepted",
    "check_proof",
    "make_challenge",
    "prove",
]

MAX_HANDSHAKE_FRAME_BYTES = 4096
"""A stranger may make us hold no more than this."""

_NONCE_BYTES = 32


class _Handshake(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Not part of `messages`: nobody but `channel` ever sees these."""


class Challenge(_Handshake, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes


class Proof(_Handshake, frozen=True, kw_only=True):
    protocol: int
    nonce: bytes
    hello: bytes
    """A `Hello` in msgpack: the MAC is over these very bytes."""
    mac: bytes


class Accepted(_Handshake, frozen=True, kw_only=True):
    mac: bytes


class Rejected(_Handshake, frozen=True, kw_only=True):
    reason: str


def make_challenge() -> Challenge:
    return Challenge(protocol=PROTOCOL, nonce=secrets.token_bytes(_NONCE_BYTES))


def prove(challenge: Challenge, secret: str, fingerprint: str, hello: Hello) -> Proof:
    """The client's answer; `fingerprint` is the certificate that it sees, or "" without TLS."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    encoded = msgspec.msgpack.encode(hello)
    mac = _mac(secret, b"client", challenge.nonce, nonce, fingerprint, encoded)
    return Proof(protocol=PROTOCOL, nonce=nonce, hello=encoded, mac=mac)


def check_proof(challenge: Challenge, proof: Proof, secret: str, fingerprint: str) -> Accepted | Rejected:
    """The server's verdict. The protocol comes first: it needs no secret, and its reason is the more useful one."""
    if proof.protocol != PROTOCOL:
        return Rejected(
            reason=f"This controller speaks protocol {PROTOCOL} and the client protocol {proof.protocol}:"
            " install the same version of holdfast on both."
        )
    expected = _mac(secret, b"client", challenge.nonce, proof.nonce, fingerprint, proof.hello)
    if len(proof.nonce) != _NONCE_BYTES or not hmac.compare_digest(expected, proof.mac):
        return Rejected(
            reason="The run secret is not the controller's: copy the controller's file `secret`, or HOLDFAST_TOKEN."
        )
    return Accepted(mac=_mac(secret, b"server", challenge.nonce, proof.nonce, fingerprint, proof.hello))


def check_accepted(challenge: Challenge, proof: Proof, accepted: Accepted, secret: str, fingerprint: str) -> bool:
    """Whether the server knows the run secret too."""
    expected = _mac(secret, b"server", challenge.nonce, proof.nonce, fingerprint, proof.hello)
    return hmac.compare_digest(expected, accepted.mac)


def _mac(secret: str, side: bytes, server_nonce: bytes, client_nonce: bytes, fingerprint: str, hello: bytes) -> bytes:
    parts = [b"holdfast", side, server_nonce, client_nonce, fingerprint.encode(), hello]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()
