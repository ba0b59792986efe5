"""Builds on the bootstrap host that fail: reason, remedy, retries, and the run after the fix."""

import os
import platform
from pathlib import Path

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.controllers.image_build.site import MovableClock, RegistryClock
from tests.installer.pool_builds import InstallSite, RecordingContext
from tests.installer.registries import CLOCK, LIMIT, make_registry
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import PUSHER, RegistryService, lab_registry
from tests.waiting import wait_until
from treenail.clocks import Clock
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail.installer.images.pool_image import PoolBuildError

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration]
MIB = 1024 * 1024


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> InstallSite:
    found = InstallSite(tmp_path / "install", lab_registry)
    found.push_base()
    return found


def fail_build(
    site: InstallSite,
    registry: BootstrapRegistry | None,
    *,
    clock: Clock = CLOCK,
    context: RecordingContext | None = None,
    **settings: object,
) -> PoolBuildError:
    builder = site.make_builder(registry, clock=clock, **settings)
    with pytest.raises(PoolBuildError) as caught:
        builder.build_pool_image(site.read_inputs(), context or RecordingContext())
    return caught.value


@needs_buildah
@needs_busybox
def test_failed_instruction_ends_at_once_and_its_correction_pulls_nothing_again(
    site: InstallSite, tmp_path: Path, lab_registry: RegistryService
) -> None:
    site.base = push_base(lab_registry, tmp_path)
    site.text = "FROM configs AS final\nRUN echo looking; cat /absent\n"
    site.write()
    context = RecordingContext()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry, context=context)
        assert str(error).startswith(
            "cannot build the image of pool master: InstructionFailed: line 2 of the Containerfile:"
        )
        assert "spec.containerFile" in error.remedy
        assert error.remedy.endswith(
            f"then run: treenail-controller install bootstrap --dir {site.root}"
        )
        assert context.waits == []
        report = site.read_report()
        assert (report["reason"], report["line"]) == ("InstructionFailed", 2)
        assert "/absent" in str(report["output"])
        before = len(lab_registry.front.requests)
        site.text = "FROM configs AS final\nRUN echo looking\n"
        site.write()
        site.build(registry)
    pulls = [
        path
        for method, path, _ in lab_registry.front.requests[before:]
        if method == "GET" and "/os/base/blobs/" in path
    ]
    # The config, for the pull and for the config layer.
    assert len(set(pulls)) == 1


@needs_buildah
def test_text_that_cannot_be_parsed_is_refused_before_the_build(site: InstallSite) -> None:
    site.text = "FRMO configs\n"
    site.write()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry)
    assert "FRMO" in str(error)
    assert not list(site.directory.logs.glob("builds/*/*"))


@pytest.mark.parametrize("text", ["", "FROM configs AS final\nRUN true\n"])
def test_absent_base_image_ends_at_once(
    site: InstallSite, lab_registry: RegistryService, text: str
) -> None:
    site.base = f"{lab_registry.host}/os/base@sha256:{'5' * 64}"
    site.text = text
    site.write()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry)
    assert "BaseNotFound" in str(error)
    assert "skopeo inspect" in error.remedy


def test_base_image_of_another_architecture_is_named(
    site: InstallSite, lab_registry: RegistryService
) -> None:
    other = "arm64" if platform.machine() == "x86_64" else "amd64"
    client = make_client(lab_registry)
    digest = push_image(client, "os/base", "other", architecture=other).digest
    client.close()
    site.base = f"{lab_registry.host}/os/base@{digest}"
    site.write()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry)
    assert "BaseNotFound" in str(error)
    assert f"found '{other}'" in str(error)


def test_refused_login_for_the_base_ends_at_once(
    site: InstallSite, lab_registry: RegistryService
) -> None:
    site.write()
    lab_registry.rotate_password("puller", "push-password-2")
    context = RecordingContext()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry, context=context)
    assert "BaseLoginRefused" in str(error)
    assert "spec.baseImagePullSecret" in error.remedy
    assert context.waits == []


def test_unreachable_base_is_named_when_the_time_limit_has_passed(
    site: InstallSite, lab_registry: RegistryService
) -> None:
    site.write()
    lab_registry.stop_backend()
    clock = MovableClock()
    context = RecordingContext(limit_s=600.0, clock=clock)
    with make_registry(site.root) as registry:
        error = fail_build(site, registry, clock=RegistryClock(clock), context=context)
    retries = [text for text in context.reports if "next attempt at" in text]
    assert len(retries) == 3  # after 1, 5 and 15 minutes
    assert all("RegistryUnreachable" in text for text in retries)
    assert "RegistryUnreachable" in str(error)
    assert str(error).endswith("after 3 attempts, and the time limit has passed")


def test_unreachable_base_is_retried_and_the_image_is_built_when_it_answers(
    site: InstallSite, lab_registry: RegistryService
) -> None:
    site.write()
    lab_registry.stop_backend()
    clock = MovableClock()

    def start_registry(_seconds: float) -> None:
        lab_registry.start_backend()
        context.on_wait = lambda _: None

    context = RecordingContext(clock=clock, on_wait=start_registry)
    with make_registry(site.root) as registry:
        builder = site.make_builder(registry, clock=RegistryClock(clock))
        image = builder.build_pool_image(site.read_inputs(), context)
    assert image.digest
    assert site.read_report(1)["reason"] == "RegistryUnreachable"
    assert site.read_report(2)["image"] == image.pull_spec
    build = site.read_object()
    assert '"attempts":1' in str(build["metadata"])


def test_full_bootstrap_registry_is_named_and_a_higher_limit_continues(
    site: InstallSite, lab_registry: RegistryService
) -> None:
    client = make_client(lab_registry)
    layers = [make_layer({"usr/lib/big": os.urandom(4 * MIB)})]
    base = push_image(client, "os/base", layers=layers)
    client.close()
    site.base = f"{lab_registry.host}/os/base@{base.digest}"
    site.write()
    with make_registry(site.root, storage_limit=2 * MIB) as registry:
        error = fail_build(site, registry)
    assert "RegistryFull" in str(error)
    assert "--registry-storage-limit" in error.remedy
    with make_registry(site.root) as registry:
        assert site.build(registry).digest


def test_external_registry_gets_the_image_and_refuses_a_login_that_only_pulls(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path / "install", lab_registry, final=lab_registry.host)
    site.push_base()
    site.pusher = "puller"
    site.write()
    error = fail_build(site, None)
    assert "PushDenied" in str(error)
    site.pusher = PUSHER
    site.write()
    image = site.build(None)
    client = make_client(lab_registry)
    assert client.head_manifest("os/node", image.digest) is not None
    client.close()


def test_absent_push_secret_is_refused_before_the_build(site: InstallSite) -> None:
    site.spec = {"renderedImagePushSecret": {"name": "absent"}}
    site.write()
    with make_registry(site.root) as registry:
        error = fail_build(site, registry)
    assert "Secret builds/absent" in str(error)


def test_registry_that_fills_up_is_named_and_continues_when_space_is_free(
    site: InstallSite,
) -> None:
    site.write()
    clock = MovableClock()
    with make_registry(site.root) as registry:
        ballast = registry.storage / "ballast"
        ballast.touch()
        os.truncate(ballast, LIMIT + 1)
        wait_until(registry.find_problem)

        def free_space(_seconds: float) -> None:
            if ballast.exists():
                ballast.unlink()
                wait_until(lambda: not registry.find_problem() and registry.pids[1])

        context = RecordingContext(clock=clock, on_wait=free_space)
        builder = site.make_builder(registry, clock=RegistryClock(clock))
        image = builder.build_pool_image(site.read_inputs(), context)
    report = site.read_report(1)
    assert report["reason"] == "RegistryFull"
    assert "above its limit of 64 MiB" in str(report["message"])
    assert site.read_report(2)["image"] == image.pull_spec
