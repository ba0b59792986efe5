"""Manifest lists, read by this host's own skopeo from a registry."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.oci_registry import OciRegistry
from treenail.clocks import SystemClock
from treenail.host.container.registry import SkopeoClient
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.kernel import HostKernel
from treenail.observations import ImageInspection, InspectionProblem
from treenail.process import ProgramRunner

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed"),
]


@pytest.fixture
def registry() -> Iterator[OciRegistry]:
    with OciRegistry("os/node") as registry:
        yield registry


@pytest.fixture
def skopeo(registry: OciRegistry, tmp_path: Path) -> SkopeoClient:
    configuration = tmp_path / ".config/containers/registries.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text(f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n')
    environment = {**os.environ, "HOME": str(tmp_path)}
    return SkopeoClient(ProgramRunner(SystemClock(), environment), FakeClock(), timeout_s=30.0)


def test_list_with_this_platform_is_inspected_as_its_image(
    registry: OciRegistry, skopeo: SkopeoClient
) -> None:
    here = HostKernel(Root()).find_architecture()
    manifests = {
        "s390x": registry.push_image("s390x", {"name": "elsewhere"}),
        here: registry.push_image(here, {"name": "here"}),
    }
    image = registry.pull_spec(registry.push_list(manifests))
    found = skopeo.inspect_image(image)
    assert isinstance(found, ImageInspection)
    assert (found.architecture, found.labels) == (here, {"name": "here"})
    assert skopeo.list_platforms(image) == ("linux/s390x", f"linux/{here}")
    assert skopeo.list_platforms(registry.pull_spec(manifests[here])) == ()


def test_list_without_this_platform_is_a_problem(
    registry: OciRegistry, skopeo: SkopeoClient
) -> None:
    manifests = {"s390x": registry.push_image("s390x", {}), "arm": registry.push_image("arm", {})}
    image = registry.pull_spec(registry.push_list(manifests))
    found = skopeo.inspect_image(image)
    assert isinstance(found, InspectionProblem)
    assert found.kind == "WrongArchitecture"
    assert found.platforms == ("linux/s390x", "linux/arm")


def test_platforms_of_missing_image_are_unknown(
    registry: OciRegistry, skopeo: SkopeoClient
) -> None:
    assert skopeo.list_platforms(registry.pull_spec(f"sha256:{'0' * 64}")) == ()
