"""Failures of registries at the pull and at the push: reason, exit code, no false success."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox, write_base_image
from tests.builder.builds import open_client, push_base
from tests.fakes.clock import FakeClock
from tests.registry.real_registry import lab_registry
from treenail.builder.build_layout import ImageLayout
from treenail.builder.build_spec import BUILT_IMAGE, BuildDirectories, BuildSpec, FetchOutput
from treenail.builder.failures import make_failed_result
from treenail.builder.phases.transfers import fetch_images, push_image
from treenail.builder.registries import ImageName, RegistrySettings, pull_from_places
from treenail.config.image_mirrors import ImageMirrors, MirrorRule
from treenail.config.pullsecret import parse_pull_secret
from treenail.errors import TreenailError
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.registry.errors import NotFound
from treenail.registry.transport import RegistryLimits, TlsSettings
from treenail_lab.registry.front import FaultKind, RegistryFault
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

__all__ = ["lab_registry"]

pytestmark = [needs_busybox, pytest.mark.process]

LIMITS = RegistryLimits(connect_s=1.0, idle_s=0.5, request_s=2.0)
BLOBS = r"/blobs/"


def make_settings(
    registry: RegistryService, user: str, *, secret: bytes | None = None, ca: str | None = None
) -> RegistrySettings:
    content = registry.make_auth_json(user) if secret is None else secret
    return RegistrySettings(
        secret=parse_pull_secret(content, where="the Secret"),
        tls=TlsSettings(ca_pem=registry.ca_file.read_text() if ca is None else ca),
        limits=LIMITS,
    )


def prepare(directory: Path, text: str, push_spec: str) -> BuildDirectories:
    directories = BuildDirectories(directory / "inputs", directory / "work")
    directories.inputs.mkdir()
    directories.work.mkdir()
    (directories.inputs / "Containerfile").write_text(text)
    spec = BuildSpec(push_spec=push_spec, architecture=ARCHITECTURE)
    (directories.inputs / "build.json").write_text(json.dumps(spec.to_json()))
    return directories


def test_image_of_a_blocked_registry_without_a_mirror_is_not_found() -> None:
    mirrors = ImageMirrors((MirrorRule("quay.io", is_blocked=True),))
    name = ImageName("quay.io", "os/base", "1")
    with pytest.raises(NotFound, match=r"cannot pull quay\.io/os/base: its registry is blocked"):
        pull_from_places(name, mirrors, lambda _: None)


def fetch(directories: BuildDirectories, settings: RegistrySettings) -> BuildResult:
    try:
        return fetch_images(directories, settings, FakeClock())
    except TreenailError as error:
        return make_failed_result(error, BuildPhase.FETCH)


def push(directories: BuildDirectories, settings: RegistrySettings) -> BuildResult:
    try:
        return push_image(directories, settings, FakeClock())
    except TreenailError as error:
        return make_failed_result(error, BuildPhase.PUSH)


def prepare_push(registry: RegistryService, directory: Path) -> BuildDirectories:
    """Prepare the work directory as `build` leaves it."""
    directories = prepare(directory, "FROM scratch\n", f"{registry.host}/os/node:built")
    layout = ImageLayout(directories.layout)
    layout.create()
    write_base_image(layout, BUILT_IMAGE, sizes=(400_000,))
    directories.write_fetched(FetchOutput())
    return directories


STATUSES = {
    401: ("BaseLoginRefused", "PushLoginRefused"),
    403: ("BaseLoginRefused", "PushDenied"),
    404: ("BaseNotFound", "PushDenied"),
    413: ("BaseNotFound", "PushDenied"),
    429: ("RegistryBusy", "RegistryBusy"),
    500: ("RegistryBusy", "RegistryBusy"),
    503: ("RegistryBusy", "RegistryBusy"),
}
USER_REASONS = {"BaseNotFound", "PushDenied", "CertificateUnknown"}


@pytest.mark.parametrize("status", STATUSES)
def test_fetch_from_a_registry_that_answers_a_status_has_its_reason(
    lab_registry: RegistryService, tmp_path: Path, status: int
) -> None:
    base = push_base(lab_registry, tmp_path)
    directories = prepare(tmp_path, f"FROM {base}\n", f"{lab_registry.host}/os/node:built")
    lab_registry.faults.add(
        RegistryFault(FaultKind.STATUS, "GET", "/manifests/", times=0, status=status)
    )
    result = fetch(directories, make_settings(lab_registry, PULLER))
    check_failure(result, STATUSES[status][0], lab_registry)
    lab_registry.faults.clear()
    assert fetch(directories, make_settings(lab_registry, PULLER)).has_succeeded


@pytest.mark.parametrize("status", STATUSES)
def test_push_to_a_registry_that_answers_a_status_has_its_reason(
    lab_registry: RegistryService, tmp_path: Path, status: int
) -> None:
    directories = prepare_push(lab_registry, tmp_path)
    lab_registry.faults.add(
        RegistryFault(FaultKind.STATUS, "PUT", "/manifests/", times=0, status=status)
    )
    result = push(directories, make_settings(lab_registry, PUSHER))
    check_failure(result, STATUSES[status][1], lab_registry)
    lab_registry.faults.clear()
    result = push(directories, make_settings(lab_registry, PUSHER))
    assert result.has_succeeded
    check_pushed(lab_registry, result.digest)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.HANG, FaultKind.TRUNCATE])
def test_fetch_from_a_registry_that_breaks_off_is_retried_later(
    lab_registry: RegistryService, tmp_path: Path, kind: FaultKind
) -> None:
    base = push_base(lab_registry, tmp_path)
    directories = prepare(tmp_path, f"FROM {base}\n", f"{lab_registry.host}/os/node:built")
    lab_registry.faults.add(RegistryFault(kind, "GET", BLOBS, times=0, after_bytes=10))
    result = fetch(directories, make_settings(lab_registry, PULLER))
    check_failure(result, "RegistryUnreachable", lab_registry)
    assert not (directories.work / "fetched.json").exists()


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.HANG, FaultKind.CUT])
def test_push_to_a_registry_that_breaks_off_is_retried_later(
    lab_registry: RegistryService, tmp_path: Path, kind: FaultKind
) -> None:
    directories = prepare_push(lab_registry, tmp_path)
    lab_registry.faults.add(RegistryFault(kind, "PUT|PATCH", BLOBS, times=0, after_bytes=10))
    result = push(directories, make_settings(lab_registry, PUSHER))
    check_failure(result, "RegistryUnreachable", lab_registry)


def test_push_through_short_faults_succeeds(lab_registry: RegistryService, tmp_path: Path) -> None:
    directories = prepare_push(lab_registry, tmp_path)
    for fault in (
        RegistryFault(FaultKind.STATUS, "POST", BLOBS, status=503),
        RegistryFault(FaultKind.CUT, "PUT|PATCH", BLOBS, after_bytes=1000),
        RegistryFault(FaultKind.STATUS, "PUT", "/manifests/", status=429, retry_after="3"),
        RegistryFault(FaultKind.LOSE, "PUT", "/manifests/"),
    ):
        lab_registry.faults.add(fault)
    result = push(directories, make_settings(lab_registry, PUSHER))
    assert result.has_succeeded, result.message
    check_pushed(lab_registry, result.digest)


def test_fetch_of_changed_content_is_a_digest_mismatch(
    lab_registry: RegistryService, tmp_path: Path
) -> None:
    base = push_base(lab_registry, tmp_path)
    directories = prepare(tmp_path, f"FROM {base}\n", f"{lab_registry.host}/os/node:built")
    lab_registry.faults.add(RegistryFault(FaultKind.CORRUPT, "GET", BLOBS, times=0))
    result = fetch(directories, make_settings(lab_registry, PULLER))
    check_failure(result, "DigestMismatch", lab_registry)


def test_push_that_the_registry_stores_as_another_digest_fails(
    lab_registry: RegistryService, tmp_path: Path
) -> None:
    directories = prepare_push(lab_registry, tmp_path)
    lab_registry.faults.add(RegistryFault(FaultKind.WRONG_DIGEST, "HEAD", "/manifests/", times=0))
    result = push(directories, make_settings(lab_registry, PUSHER))
    check_failure(result, "DigestMismatch", lab_registry)


def test_push_with_the_login_for_pulls_is_denied(
    lab_registry: RegistryService, tmp_path: Path
) -> None:
    directories = prepare_push(lab_registry, tmp_path)
    result = push(directories, make_settings(lab_registry, PULLER))
    check_failure(result, "PushDenied", lab_registry)


@pytest.mark.parametrize("phase", [BuildPhase.FETCH, BuildPhase.PUSH])
def test_rotated_login_is_refused_until_the_secret_has_it(
    lab_registry: RegistryService, tmp_path: Path, phase: BuildPhase
) -> None:
    base = push_base(lab_registry, tmp_path)
    if phase is BuildPhase.PUSH:
        directories, run, reason = prepare_push(lab_registry, tmp_path), push, "PushLoginRefused"
    else:
        directories = prepare(tmp_path, f"FROM {base}\n", f"{lab_registry.host}/os/node:built")
        run, reason = fetch, "BaseLoginRefused"
    old = make_settings(lab_registry, PUSHER)
    lab_registry.rotate_password(PUSHER, "push-password-2")
    check_failure(run(directories, old), reason, lab_registry)
    assert run(directories, make_settings(lab_registry, PUSHER)).has_succeeded


@pytest.mark.parametrize("phase", [BuildPhase.FETCH, BuildPhase.PUSH])
def test_unknown_certificate_has_its_reason(
    lab_registry: RegistryService, tmp_path: Path, phase: BuildPhase
) -> None:
    base = push_base(lab_registry, tmp_path)
    if phase is BuildPhase.PUSH:
        directories, run = prepare_push(lab_registry, tmp_path), push
    else:
        directories = prepare(tmp_path, f"FROM {base}\n", f"{lab_registry.host}/os/node:built")
        run = fetch
    result = run(directories, make_settings(lab_registry, PUSHER, ca=""))
    check_failure(result, "CertificateUnknown", lab_registry)


@pytest.mark.parametrize("phase", [BuildPhase.FETCH, BuildPhase.PUSH])
def test_unreachable_registry_has_its_reason(tmp_path: Path, phase: BuildPhase) -> None:
    with unused_port() as port:
        for number, host in enumerate(("registry.invalid:5000", f"127.0.0.1:{port}")):
            directory = tmp_path / str(number)
            directory.mkdir()
            directories = prepare(directory, f"FROM {host}/os/base:1\n", f"{host}/os/node:built")
            settings = RegistrySettings(limits=LIMITS)
            if phase is BuildPhase.FETCH:
                result = fetch(directories, settings)
            else:
                layout = ImageLayout(directories.layout)
                layout.create()
                write_base_image(layout, BUILT_IMAGE)
                directories.write_fetched(FetchOutput())
                result = push(directories, settings)
            assert result.reason == "RegistryUnreachable", result.message
            assert result.exit_code == 75


@pytest.mark.parametrize(
    "is_real",
    [True, pytest.param(False, id="small", marks=pytest.mark.long)],
)
def test_push_to_a_full_registry_has_its_reason(tmp_path: Path, *, is_real: bool) -> None:
    if is_real:
        pytest.importorskip("treenail_lab.registry.service")
    with RegistryService(is_real=is_real, storage_bytes=256 * 1024) as registry:
        directories = prepare_push(registry, tmp_path)
        result = push(directories, make_settings(registry, PUSHER))
        check_failure(result, "RegistryFull", registry)


@pytest.mark.parametrize("secret", [b"{", b'{"auths": {"a b": {}}}'])
def test_unusable_secret_is_a_refused_login(
    lab_registry: RegistryService, tmp_path: Path, secret: bytes
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(secret)
    try:
        RegistrySettings.read(path, None, {})
    except TreenailError as error:
        result = make_failed_result(error, BuildPhase.PUSH)
    else:
        pytest.fail("a broken Secret was accepted")
    check_failure(result, "PushLoginRefused", lab_registry)


def check_failure(result: BuildResult, reason: str, registry: RegistryService) -> None:
    assert result.reason == reason, result.message
    assert not result.digest
    assert result.exit_code == (64 if reason in USER_REASONS else 75)
    assert not any(password in result.to_text() for password in registry.passwords.values())


def check_pushed(registry: RegistryService, digest: str) -> None:
    with open_client(registry) as client:
        found = client.head_manifest("os/node", "built")
        assert found.digest == digest


@contextmanager
def unused_port() -> Iterator[int]:
    """Reserve a port where no server listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
