"""Checks of images and logins in registries, before an installation starts."""

import base64
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.oci_registry import OciRegistry
from tests.installer.directories import (
    BASE,
    make_config,
    make_image_config,
    make_pool,
    write_manifest,
)
from tests.registry.images import make_client, push_image
from tests.registry.real_registry import PULLER, PUSHER, RegistryService, lab_registry
from treenail.api import annotations as key
from treenail.builder.registries import RegistrySettings
from treenail.cli.controller.main import main
from treenail.controllers.handover.image_mode import ImageMode, RegistryType
from treenail.controllers.handover.image_mode_field import build_settings_configmap
from treenail.image.oci.documents import BASE_IMAGE
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.directory.online_checks import OnlineChecks, RegistryChecker, read_labels
from treenail.registry.transport import TlsSettings

__all__ = ["lab_registry"]

BOOTC = {"containers.bootc": "1"}


@pytest.fixture
def registry() -> Iterator[OciRegistry]:
    with OciRegistry("os/node") as registry:
        yield registry


def check(
    root: Path, *, tls: TlsSettings | None = None, base: str = "", architecture: str = "amd64"
) -> tuple[list[str], list[str]]:
    """Return problems and notes of the manifests."""
    settings = RegistrySettings(tls=tls or TlsSettings(is_plain=True))
    checks = OnlineChecks(RegistryChecker(settings, FakeClock()), base_image=base)
    architectures = dict.fromkeys(("master", "layered"), architecture)
    problems, notes = checks.find_problems(read_install_manifests(root), architectures)
    return [str(each) for each in problems], notes


def write_prebuilt(root: Path, image: str) -> None:
    config = make_image_config("layered", annotations={key.PRE_BUILT_IMAGE: image})
    write_manifest(root, "manifests/a.yaml", make_pool("layered"), config)


def test_prebuilt_image_of_the_release_has_no_problem(
    tmp_path: Path, registry: OciRegistry
) -> None:
    digest = registry.push_image("amd64", {**BOOTC, BASE_IMAGE: BASE})
    write_prebuilt(tmp_path, registry.pull_spec(digest))
    assert check(tmp_path, base=BASE.replace("registry.", "mirror.")) == ([], [])


def test_prebuilt_image_in_a_list_is_found_by_architecture(
    tmp_path: Path, registry: OciRegistry
) -> None:
    labels = {**BOOTC, BASE_IMAGE: BASE}
    images = {name: registry.push_image(name, labels) for name in ("amd64", "arm64")}
    write_prebuilt(tmp_path, registry.pull_spec(registry.push_list(images)))
    assert check(tmp_path, base=BASE, architecture="arm64") == ([], [])
    (problem,), _ = check(tmp_path, base=BASE, architecture="s390x")
    assert "has no image for linux/s390x; it has: amd64, arm64" in problem


@pytest.mark.parametrize(
    ("architecture", "labels", "expected"),
    [
        ("arm64", BOOTC, "expected an image for linux/amd64, found 'arm64'"),
        ("amd64", {BASE_IMAGE: BASE}, "is no bootable image"),
        (
            "amd64",
            {**BOOTC, BASE_IMAGE: BASE.replace("0123", "4567")},
            "was built from registry.example.com/os/base@sha256:4567",
        ),
    ],
)
def test_unfit_prebuilt_image_is_a_problem(
    tmp_path: Path,
    registry: OciRegistry,
    architecture: str,
    labels: dict[str, str],
    expected: str,
) -> None:
    """Gap (b): the MCO compares nothing."""
    write_prebuilt(tmp_path, registry.pull_spec(registry.push_image(architecture, labels)))
    problems, _ = check(tmp_path, base=BASE)
    assert len(problems) == 1
    assert problems[0].startswith("manifests/a.yaml, line ")
    assert expected in problems[0]


def test_missing_prebuilt_image_is_a_problem(tmp_path: Path, registry: OciRegistry) -> None:
    write_prebuilt(tmp_path, registry.pull_spec(f"sha256:{'0' * 64}"))
    (problem,), _ = check(tmp_path)
    assert "pre-built image: cannot" in problem


def test_prebuilt_image_of_an_unknown_base_is_a_note(tmp_path: Path, registry: OciRegistry) -> None:
    write_prebuilt(tmp_path, registry.pull_spec(registry.push_image("amd64", BOOTC)))
    problems, notes = check(tmp_path, base=BASE)
    assert problems == []
    assert "does not say which base" in notes[0]


def test_prebuilt_image_without_a_known_release_is_a_note(
    tmp_path: Path, registry: OciRegistry
) -> None:
    digest = registry.push_image("amd64", {**BOOTC, BASE_IMAGE: BASE})
    write_prebuilt(tmp_path, registry.pull_spec(digest))
    problems, notes = check(tmp_path)
    assert problems == []
    assert "--base-image" in notes[0]


def write_build(
    root: Path, image: str, service: RegistryService, mode: str, user: str = PUSHER
) -> None:
    config = make_image_config("master")
    config["spec"]["renderedImagePushSpec"] = f"{service.host}/os/node:new"  # type: ignore[index]
    login = base64.b64encode(service.make_auth_json(user)).decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "push", "namespace": "treenail"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": login},
    }
    settings = build_settings_configmap(ImageMode(registry=RegistryType(mode)))
    base = make_config("10-a", "master", osImageURL=image)
    write_manifest(root, "manifests/a.yaml", make_pool("master"), config, secret, settings, base)


def test_login_that_may_only_pull_is_a_problem(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    write_build(tmp_path, "", lab_registry, "Bootstrap", PULLER)
    problems, _ = check(tmp_path, tls=TlsSettings(lab_registry.ca_file.read_text()))
    assert len(problems) == 1
    assert "refuses the login" in problems[0]


@pytest.mark.parametrize("is_accepted", [True, False])
def test_login_that_the_final_registry_refuses_is_a_problem(
    tmp_path: Path, lab_registry: RegistryService, *, is_accepted: bool
) -> None:
    write_build(tmp_path, "", lab_registry, "Bootstrap")
    if not is_accepted:
        lab_registry.rotate_password(PUSHER, "push-password-2")
    problems, notes = check(tmp_path, tls=TlsSettings(lab_registry.ca_file.read_text()))
    # Neither bootstrap host nor nodes have the CAs of these checks.
    assert len(notes) == 1
    assert notes[0].startswith(f"{lab_registry.host} is trusted with --ca alone")
    assert "ControllerConfig, as spec.additionalTrustBundle" in notes[0]
    assert len(problems) == (0 if is_accepted else 1)
    if problems:
        assert "refuses the login of Secret push for os/node" in problems[0]


@pytest.mark.parametrize(("mode", "is_problem"), [("External", True), ("Bootstrap", False)])
def test_unreachable_registry_is_a_problem_if_it_is_needed_now(
    tmp_path: Path, lab_registry: RegistryService, mode: str, *, is_problem: bool
) -> None:
    write_build(tmp_path, "", lab_registry, mode)
    # Its certificate is not trusted.
    problems, notes = check(tmp_path, tls=TlsSettings())
    assert (len(problems), len(notes)) == ((1, 0) if is_problem else (0, 1))


@pytest.mark.parametrize("mode", RegistryType)
def test_unreachable_registry_of_two_pools_is_one_problem_and_asked_twice(
    tmp_path: Path, mode: RegistryType
) -> None:
    with closing(socket.socket()) as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"localhost:{closed.getsockname()[1]}"
    base = f"{host}/os/node@{BASE.rpartition('@')[2]}"
    documents: list[dict[str, object]] = []
    for pool in ("master", "layered"):
        config = make_image_config(pool)
        config["spec"]["renderedImagePushSpec"] = f"{host}/os/{pool}:1"  # type: ignore[index]
        documents += [make_pool(pool), make_config(f"10-{pool}", pool, osImageURL=base), config]
    settings = build_settings_configmap(ImageMode(registry=mode))
    write_manifest(tmp_path, "manifests/a.yaml", *documents, settings)
    clock = FakeClock()
    checks = OnlineChecks(RegistryChecker(RegistrySettings(tls=TlsSettings(is_plain=True)), clock))
    problems, notes = checks.find_problems(
        read_install_manifests(tmp_path), dict.fromkeys(("master", "layered"), "amd64")
    )
    assert len(problems) == 1
    assert len(notes) <= 1
    # Once again after a pause: a user waits for the answer.
    assert clock.monotonic() - FakeClock().monotonic() < 3


@pytest.mark.parametrize("is_for_all", [True, False])
def test_registry_with_a_ca_of_the_controllerconfig_is_trusted(
    tmp_path: Path, lab_registry: RegistryService, *, is_for_all: bool
) -> None:
    """The builds trust these CAs, so that the checks before them do."""
    write_build(tmp_path, "", lab_registry, "External")
    ca = base64.b64encode(lab_registry.ca_file.read_bytes()).decode()
    bundle = {"file": lab_registry.host.replace(":", ".."), "data": ca}
    spec = (
        {"additionalTrustBundle": ca} if is_for_all else {"imageRegistryBundleUserData": [bundle]}
    )
    config = make_config("machine-config-controller", "master")
    write_manifest(
        tmp_path, "manifests/b.yaml", {**config, "kind": "ControllerConfig", "spec": spec}
    )
    assert check(tmp_path, tls=TlsSettings()) == ([], [])
    # With the CA in the ControllerConfig, nothing misses --ca.
    assert check(tmp_path, tls=TlsSettings(lab_registry.ca_file.read_text())) == ([], [])


def test_base_of_another_architecture_is_a_problem(
    tmp_path: Path, registry: OciRegistry, lab_registry: RegistryService
) -> None:
    image = registry.pull_spec(registry.push_image("arm64", BOOTC))
    write_build(tmp_path, image, lab_registry, "Bootstrap")
    problems, _ = check(tmp_path)
    assert any("base image: " in each and "found 'arm64'" in each for each in problems)


@pytest.mark.parametrize("config", [b"", b"[]", b'{"config": 3}', b'{"config": {"Labels": [1]}}'])
def test_config_without_labels_has_none(config: bytes) -> None:
    assert read_labels(config) == {}


def test_commands_ask_registries_with_the_files_of_their_arguments(
    tmp_path: Path, lab_registry: RegistryService, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(make_client(lab_registry)) as client:
        base = push_image(client, "os/base", labels=BOOTC)
    host, root = lab_registry.host, tmp_path / "cluster"
    for pool in ("master", "worker"):
        image = f"{host}/os/base@{base.digest}"
        config = make_config(f"10-{pool}", pool, osImageURL=image)
        write_manifest(root, f"manifests/{pool}.yaml", config)
    pools = "".join(
        f"  - {{name: {each}, renderedImagePushSpec: '{host}/os/node:{each}'}}\n"
        for each in ("master", "worker")
    )
    (root / "treenail-install.yaml").write_text(f"imageMode:\n  pools:\n{pools}")
    for user in (PUSHER, PULLER):
        (tmp_path / user).write_bytes(lab_registry.make_auth_json(user))
    files = ["--ca", str(lab_registry.ca_file), "--pull-secret", str(tmp_path / PULLER)]
    arguments = ["--dir", str(root), *files, "--push-secret", str(tmp_path / PUSHER)]
    assert main(["install", "plan", *arguments]) == 0
    assert "2 s (one layer)" in capsys.readouterr().out
    assert main(["install", "prepare", *arguments]) == 0
    assert main(["install", "prepare", "--dir", str(root), *files]) == 0
    assert "wrote" not in capsys.readouterr().out.splitlines()[-1]
    lab_registry.rotate_password(PUSHER, "push-password-2")
    assert main(["install", "prepare", "--dir", str(root), *files]) == 1
    assert "refuses the login of Secret treenail-install-push" in capsys.readouterr().err
    assert main(["install", "plan", *arguments, "--architecture", "arm64"]) == 1
    assert "expected an image for linux/arm64, found 'amd64'" in capsys.readouterr().out
