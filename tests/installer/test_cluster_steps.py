"""The steps that publish and wait for the hand-over, on the lab and on a real API server."""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.installer.pool_builds import RecordingContext
from treenail.api.component_names import NAMESPACE, PART_OF_LABELS
from treenail.api.pullspec import parse_push_spec
from treenail.clocks import SystemClock
from treenail.controllers.handover.handover_objects import (
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    Handover,
    HandoverImage,
    HandoverResult,
    build_result_configmap,
    read_handover_secret,
)
from treenail.errors import HostError, NotFoundError
from treenail.installer.bootstrap.cluster_steps import (
    FirstBootStep,
    HandoverStep,
    PublishStep,
    describe_missing_handover,
)
from treenail.installer.bootstrap.image_steps import PoolImage
from treenail.installer.install_steps import StepLimit, StepOverdueError
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, NAMESPACES, SECRETS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport

pytestmark = pytest.mark.integration
PUSH_SPEC = "registry.example.com/os/master:latest"
DIGEST = "sha256:" + "ab" * 32
LIMIT = StepLimit(10.0, "--handover-deadline")


@pytest.fixture
def client(kubeconfig: Path) -> Iterator[Client]:
    with closing(HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock())) as transport:
        found = Client(transport)
        yield found
        for resource, name in ((SECRETS, HANDOVER_SECRET), (CONFIGMAPS, RESULT_CONFIGMAP)):
            with suppress(NotFoundError):
                found.delete(resource, name, namespace=NAMESPACE)


def make_handover(digest: str = DIGEST) -> Handover:
    image = HandoverImage("master", digest, parse_push_spec(PUSH_SPEC, where="test"))
    return Handover((image,), "bootstrap.example.com:22625", "CA", "puller", "password")


def read_published(client: Client) -> Handover:
    return read_handover_secret(client.get(SECRETS, HANDOVER_SECRET, namespace=NAMESPACE))


def test_publish_creates_and_replaces_the_secret(client: Client) -> None:
    context = RecordingContext()
    FirstBootStep(lambda: client, LIMIT, lambda: "").run(context)
    PublishStep(lambda: client, make_handover, LIMIT).run(context)
    assert read_published(client) == make_handover()
    # The API server adds a label with the name.
    labels: Any = client.get(NAMESPACES, NAMESPACE)["metadata"]
    assert PART_OF_LABELS.items() <= labels["labels"].items()
    newer = make_handover("sha256:" + "cd" * 32)
    step = PublishStep(lambda: client, lambda: newer, LIMIT)
    assert (
        step.compute_inputs() != PublishStep(lambda: client, make_handover, LIMIT).compute_inputs()
    )
    step.run(context)
    assert read_published(client) == newer
    assert context.waits == []


def test_handover_waits_for_the_digest_of_this_installation(client: Client) -> None:
    PublishStep(lambda: client, make_handover, LIMIT).run(RecordingContext())
    image = PoolImage("master", f"registry.example.com/os/master@{DIGEST}", PUSH_SPEC)

    def answer(_: float) -> None:
        """Report an older image at the first pause, and this one at the second."""
        first = len(context.waits) == 1
        digest = "sha256:" + "00" * 32 if first else DIGEST
        found = build_result_configmap(HandoverResult({"master": digest}, "", ""))
        if first:
            client.create(CONFIGMAPS, found, namespace=NAMESPACE)
        else:
            client.update(CONFIGMAPS, RESULT_CONFIGMAP, found, namespace=NAMESPACE)

    context = RecordingContext(on_wait=answer)
    HandoverStep(lambda: client, [image], LIMIT, lambda: "").run(context)
    assert len(context.waits) == 2
    assert context.reports[-1] == "waiting for the image of pool master"
    assert describe_missing_handover(client, None) == ""


@pytest.mark.parametrize("is_exported", [True, False])
def test_handover_above_its_limit_says_where_the_images_are(
    client: Client, *, is_exported: bool
) -> None:
    image = PoolImage("master", f"registry.example.com/os/master@{DIGEST}", PUSH_SPEC)

    def export_images() -> str:
        if is_exported:
            return "/images"
        raise HostError("the disk is full")

    step = HandoverStep(lambda: client, [image], LIMIT, export_images)
    with pytest.raises(StepOverdueError) as caught:
        step.run(RecordingContext(limit_s=4.0))
    text = str(caught.value)
    assert "waiting for controller install" in text
    expected = (
        "kept in /images" if is_exported else "cannot be kept as OCI directories: the disk is"
    )
    assert expected in text
