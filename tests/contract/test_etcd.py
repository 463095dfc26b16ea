"""etcd in trouble, with users and with TLS: what the contract suite cannot ask of every rendezvous."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tests.contract.etcd_server import EtcdServer

from holdfast.errors import ConfigError, Unreachable
from holdfast.rendezvous.etcd import EtcdRendezvous
from holdfast.rendezvous.rendezvous import Rendezvous
from holdfast.rendezvous.session import Session
from holdfast.rendezvous.uri import open_rendezvous, parse_rendezvous_uri

pytestmark = pytest.mark.timeout(120)

_LONG_S = 60.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "data").start()
    yield server
    server.kill()


def _connect(server: EtcdServer, options: str = "", login: str = "", scheme: str = "etcd") -> Rendezvous:
    return open_rendezvous(parse_rendezvous_uri(f"{scheme}://{login}{server.address}/job{options}"))


def test_keys_sessions_and_watches_survive_a_restart_of_etcd(etcd: EtcdServer) -> None:
    one = _connect(etcd)
    reopened = threading.Event()
    session = Session(one, 5.0, reopened.set)
    session.register("host", b"1")
    one.put("stays", b"1")
    watch = one.watch()
    seen = watch.wait(None, _LONG_S)
    assert seen == {"host": b"1", "stays": b"1"}
    etcd.kill()
    assert watch.wait(seen, 0.2) == seen, "what was there last is there while etcd is away"
    etcd.start()
    one.put("after", b"1")
    while "after" not in seen:
        seen = watch.wait(seen, _LONG_S)
    assert seen["stays"] == b"1"
    while "host" not in seen:  # a restart that took longer than the time-to-live
        seen = watch.wait(seen, _LONG_S)
    watch.close()
    session.close()
    assert one.list() == {"stays": b"1", "after": b"1"}


def test_hosts_register_again_with_an_etcd_that_has_lost_its_data(etcd: EtcdServer) -> None:
    one = _connect(etcd)
    reopened = threading.Event()
    session = Session(one, 2.0, reopened.set)
    session.register("host", b"1")
    one.put("gone", b"1")
    watch = one.watch()
    seen = watch.wait(None, _LONG_S)
    etcd.kill()
    etcd.forget_data()
    etcd.start()
    assert reopened.wait(_LONG_S)
    while seen != {"host": b"1"}:
        seen = watch.wait(seen, _LONG_S)
    watch.close()
    session.close()


def test_an_etcd_that_does_not_answer_is_told_and_then_goes_on(etcd: EtcdServer) -> None:
    impatient = EtcdRendezvous(parse_rendezvous_uri(f"etcd://{etcd.address}/job"), patience_s=0.0)
    impatient.put("k", b"1")
    watch = impatient.watch()
    seen = watch.wait(None, _LONG_S)
    etcd.suspend()
    with pytest.raises(Unreachable, match="does not answer"):
        impatient.get("k")
    etcd.resume()
    patient = _connect(etcd)
    patient.put("k", b"2")
    assert watch.wait(seen, _LONG_S) == {"k": b"2"}
    watch.close()


def test_another_endpoint_is_asked_when_the_first_is_away(etcd: EtcdServer) -> None:
    uri = parse_rendezvous_uri(f"etcd://127.0.0.1:1,{etcd.address}/job")
    one = EtcdRendezvous(uri, patience_s=0.0)
    one.put("k", b"1")
    assert one.get("k") == b"1"
    watch = one.watch()
    assert watch.wait(None, _LONG_S) == {"k": b"1"}
    watch.close()


def test_a_user_with_a_password_reads_and_writes_and_others_do_not(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, order in [
        ("user/add", {"name": "root", "password": "secret word"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ]:
        _post(etcd, f"auth/{method}", order)
    stranger, wrong = _connect(etcd), _connect(etcd, login="root:no@")
    for refused in (stranger, wrong):
        with pytest.raises(ConfigError) as error:
            refused.put("k", b"1")
        assert "secret" not in str(error.value) and "no@" not in str(error.value)
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "secret word")
    known = _connect(etcd, login="root@")
    session = Session(known, 5.0)
    session.register("host", b"1")
    watch = known.watch()
    seen = watch.wait(None, _LONG_S)
    assert seen == {"host": b"1"}
    # A new etcd knows the user by its data, and none of the tokens that it has given.
    etcd.kill()
    etcd.start()
    known.put("k", b"1")
    while seen.get("k") != b"1":
        seen = watch.wait(seen, _LONG_S)
    watch.close()
    session.close()


def test_tls_with_an_authority_and_a_certificate_of_the_client(tmp_path: Path) -> None:
    ca, server_files, client_files = _make_certificates(tmp_path)
    options = ["--cert-file", str(server_files[0]), "--key-file", str(server_files[1])]
    options += ["--trusted-ca-file", str(ca), "--client-cert-auth"]
    server = EtcdServer(tmp_path / "data", options=options, scheme="https").start()
    try:
        good = _connect(server, f"?cacert={ca}&cert={client_files[0]}&key={client_files[1]}", scheme="etcds")
        session = Session(good, 5.0)
        session.register("host", b"1")
        watch = good.watch()
        seen = watch.wait(None, _LONG_S)
        assert seen == {"host": b"1"}
        good.put("k", b"1")
        assert watch.wait(seen, _LONG_S) == {"host": b"1", "k": b"1"}
        watch.close()
        session.close()
        nobody = parse_rendezvous_uri(f"etcds://{server.address}/job?cacert={ca}")
        with pytest.raises(Unreachable):
            EtcdRendezvous(nobody, patience_s=0.0).get("k")
        distrustful = parse_rendezvous_uri(f"etcds://{server.address}/job")
        with pytest.raises(Unreachable, match="certificate"):
            EtcdRendezvous(distrustful, patience_s=0.0).get("k")
    finally:
        server.kill()


def _post(server: EtcdServer, method: str, order: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("POST", f"/v3/{method}", json.dumps(order))
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()


def _make_certificates(directory: Path) -> tuple[Path, tuple[Path, Path], tuple[Path, Path]]:
    """An authority, and what it has signed for a server at 127.0.0.1 and for a client."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _sign("authority", authority_key, None, authority_key)
    pem = serialization.Encoding.PEM
    (directory / "ca.pem").write_bytes(authority.public_bytes(pem))
    made = []
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = directory / f"{name}.pem", directory / f"{name}.key"
        certificate.write_bytes(_sign(name, key, authority, authority_key).public_bytes(pem))
        plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_file.write_bytes(key.private_bytes(pem, *plain))
        made.append((certificate, key_file))
    return directory / "ca.pem", made[0], made[1]


def _sign(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None, by: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return builder.sign(by, hashes.SHA256())
