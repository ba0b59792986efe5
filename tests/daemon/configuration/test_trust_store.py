"""The trust store of a machine follows its anchors, as update-ca-trust of the lab extracts them."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.host_machine import make_machine
from treenail.config.trust_anchors import find_certificates
from treenail.daemon.configuration.trust_store import (
    ANCHORS,
    BUNDLE,
    CHECK_INTERVAL_S,
    PROGRAM,
    TrustStore,
)
from treenail.errors import CommandError
from treenail.host.filesystem.root_directory import Root
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.images import ImageCatalogue, save_catalogue
from treenail_lab.machine import settings
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

REJECTED = (
    f"the trust store lacks 1 certificates of {ANCHORS}/bundle.crt: update-ca-trust rejects them"
)
VENDOR = "/usr/share/pki/ca-trust-source/anchors"


class Programs:
    """Runs the programs of the machine, and counts the runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.error = ""

    def run_command(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        self.runs += 1
        if self.error:
            raise CommandError(self.error)
        done = subprocess.run(argv, capture_output=True, check=True, timeout=timeout_s)
        return done.stdout


class Site:
    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        catalogue, settings_file = directory / "images.json", directory / "settings.json"
        save_catalogue(ImageCatalogue(()), catalogue)
        settings.save_settings(MachineSettings(), settings_file)
        commands.install_programs(self.root, catalogue, settings_file)
        self.clock = FakeClock()
        self.start()

    def start(self) -> None:
        """Start the agent again."""
        machine = make_machine(Root(self.root), clock=self.clock)
        self.programs = Programs()
        machine.__dict__["unsandboxed"] = self.programs
        self.store = TrustStore(machine)

    def write(self, path: str, content: bytes) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def read_bundle(self) -> frozenset[str]:
        return find_certificates((self.root / BUNDLE.lstrip("/")).read_bytes())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return [
        CertificateAuthority(tmp_path_factory.mktemp("pki")).file.read_bytes() for _ in range(2)
    ]


def test_anchor_of_an_image_is_extracted_once(site: Site, pems: list[bytes]) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    assert site.store.sync_store() == ()
    assert find_certificates(pems[0]) <= site.read_bundle()
    site.clock.move(CHECK_INTERVAL_S)
    assert site.store.sync_store() == ()
    assert site.programs.runs == 1
    site.start()
    site.store.sync_store()
    assert site.programs.runs == 0


def test_machine_without_anchors_is_left_alone(site: Site) -> None:
    assert site.store.sync_store() == ()
    assert site.programs.runs == 0
    assert not (site.root / "var/lib/treenail").exists()


def test_anchor_that_an_image_extracted_is_not_extracted_again(
    site: Site, pems: list[bytes]
) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    site.write(BUNDLE, b"# comment\n" + pems[0])
    assert site.store.sync_store() == ()
    assert site.programs.runs == 0


@pytest.mark.parametrize("path", [f"{ANCHORS}/bundle.crt", f"{VENDOR}/vendor.pem"])
def test_removed_certificate_is_no_longer_trusted(site: Site, pems: list[bytes], path: str) -> None:
    site.write(f"{ANCHORS}/other.crt", pems[0])
    site.write(path, pems[1])
    site.store.sync_store()
    assert find_certificates(pems[1]) <= site.read_bundle()
    (site.root / path.lstrip("/")).unlink()
    site.start()
    site.store.sync_store()
    assert not find_certificates(pems[1]) & site.read_bundle()


def test_store_of_another_deployment_is_extracted_again(site: Site, pems: list[bytes]) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    site.store.sync_store()
    # A rollback brings the /etc of the previous deployment; /var stays.
    site.write(BUNDLE, b"")
    site.start()
    site.store.sync_store()
    assert find_certificates(pems[0]) <= site.read_bundle()


def test_failing_program_is_reported_and_tried_again(site: Site, pems: list[bytes]) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    site.programs.error = "update-ca-trust failed with exit code 1"
    problems = site.store.sync_store()
    assert problems == ("cannot update the trust store: update-ca-trust failed with exit code 1",)
    assert site.store.sync_store() == problems
    assert site.programs.runs == 1
    site.programs.error = ""
    site.clock.move(CHECK_INTERVAL_S)
    assert site.store.sync_store() == ()
    assert site.programs.runs == 2


def test_rejected_certificate_is_reported_and_extracted_once(site: Site, pems: list[bytes]) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    # A program that succeeds and leaves the certificate out, as one that is no CA.
    (site.root / PROGRAM.lstrip("/")).write_text("#!/bin/sh\nexit 0\n")
    problems = site.store.sync_store()
    assert problems == (REJECTED,)
    site.clock.move(CHECK_INTERVAL_S)
    assert site.store.sync_store() == problems
    assert site.programs.runs == 1


def test_machine_without_the_program_is_reported(site: Site, pems: list[bytes]) -> None:
    site.write(f"{ANCHORS}/bundle.crt", pems[0])
    (site.root / PROGRAM.lstrip("/")).unlink()
    problem = site.store.sync_store()[0]
    assert problem == f"cannot update the trust store: this machine has no {PROGRAM}"
