"""TLS off loopback without a certificate authority: a self-made certificate, which the run secret vouches for.

The controller makes a certificate when it listens off loopback. An agent accepts any, and then both prove that they
know the secret, over the certificate's fingerprint as well (`auth`): whoever does not know it cannot stand in between.
`cryptography` (the `cluster` extra) is imported here only, and only to make one.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass

from holdfast.errors import MissingExtra

__all__ = ["Identity", "client_context", "fingerprint_of", "make_identity", "server_context"]

_LIFETIME = datetime.timedelta(days=3650)
"""Longer than any run: nothing checks dates, for the proofs are over this very certificate."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A server's certificate and key (PEM), and the certificate's fingerprint."""

    certificate: bytes
    key: bytes
    fingerprint: str


def make_identity() -> Identity:
    """A fresh self-signed certificate on P-256. It lives in memory only."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra("Agents on other machines need TLS; run: pip install 'holdfast[cluster]'") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    return Identity(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        fingerprint=fingerprint_of(certificate.public_bytes(serialization.Encoding.DER)),
    )


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER form, in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # ssl reads certificates from files only: an anonymous one in memory leaves the key nowhere.
    fd = os.memfd_create("holdfast-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, identity.certificate + identity.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    context.num_tickets = 0  # nobody resumes a session
    return context


def client_context() -> ssl.SSLContext:
    """No authority is asked: the handshake of `channel` proves that the certificate is the controller's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
