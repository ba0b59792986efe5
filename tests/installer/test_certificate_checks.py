"""The checks of a bootstrap host before anything starts: its clock and its space."""

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.installer.processes import bootstrap, make_directory, run_install
from treenail.errors import ConfigError, HostError
from treenail.installer.bootstrap.installation_ca import check_certificates
from treenail.installer.bootstrap.registry_process import check_space
from treenail.installer.bootstrap.server_certificates import check_host_clock
from treenail.installer.directory.install_files import InstallFiles

NOW = dt.datetime(2026, 6, 1, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


def make_certificate(begin: dt.datetime, end: dt.datetime) -> tuple[bytes, bytes]:
    """Return a certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


@pytest.mark.parametrize("offset", [-2 * DAY, 2 * DAY])
def test_clock_that_is_wrong_by_days_is_named_with_the_certificate(offset: dt.timedelta) -> None:
    certificate, _ = make_certificate(NOW - DAY, NOW + DAY)
    check_certificates({"tls.crt": certificate}, NOW.timestamp())
    with pytest.raises(ConfigError) as caught:
        check_certificates({"tls.crt": certificate}, (NOW + offset).timestamp())
    assert "certificates with this host's clock, which shows 2026-0" in str(caught.value)
    assert "tls.crt is valid from 2026-05-31T12:00:00Z to 2026-06-02T12:00:00Z" in str(caught.value)
    assert "chronyc makestep" in caught.value.remedy


def test_every_certificate_of_a_chain_is_checked() -> None:
    good, _ = make_certificate(NOW - DAY, NOW + DAY)
    old, _ = make_certificate(NOW - 3 * DAY, NOW - 2 * DAY)
    check_certificates({"chain": good + good, "empty": b""}, NOW.timestamp())
    with pytest.raises(ConfigError, match="the certificate chain is valid from"):
        check_certificates({"chain": good + old}, NOW.timestamp())


def test_file_that_is_no_certificate_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the certificate tls\.crt: expected PEM"):
        check_certificates({"tls.crt": b"no certificate"}, NOW.timestamp())


@pytest.mark.process
def test_missing_files_have_no_certificates(tmp_path: Path) -> None:
    check_host_clock(InstallFiles(), [tmp_path / "missing"], {"empty": b""}, NOW.timestamp())
    old, _ = make_certificate(NOW - 3 * DAY, NOW - 2 * DAY)
    (tmp_path / "old").write_bytes(old)
    with pytest.raises(ConfigError, match="old is valid from") as caught:
        check_host_clock(InstallFiles(), [tmp_path / "old"], {}, NOW.timestamp())
    assert "chronyc makestep" in caught.value.remedy


def test_file_system_without_space_is_named_with_the_remedy(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(HostError, match="MiB free, and the installation needs") as caught:
        check_space(tmp_path, 1 << 60)
    assert f"du -xsh {tmp_path}/.treenail" in caught.value.remedy


@pytest.mark.process
def test_installation_with_an_expired_certificate_does_not_start(tmp_path: Path) -> None:
    root = make_directory(tmp_path / "cluster")
    now = dt.datetime.now(dt.UTC)
    certificate, key = make_certificate(now - 3 * DAY, now - DAY)
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    found = run_install(
        "bootstrap", "--dir", root, "--listen=127.0.0.1:0",
        f"--certificate={tmp_path}/tls.crt", f"--key={tmp_path}/tls.key",
    )  # fmt: skip
    assert found.returncode == 5
    assert "clock" in found.stderr
    assert "tls.crt is valid from" in found.stderr.replace("\n    ", " ")
    assert not (root / "machine-pools").exists()
    half = run_install("bootstrap", "--dir", root, f"--certificate={tmp_path}/tls.crt")
    assert half.returncode == 64
    with bootstrap(root) as process:
        process.wait_for_status(is_serving=True)
