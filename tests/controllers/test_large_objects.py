"""Objects that any user can create keep no controller from its work.

Each controller waits only for the kinds that it requires, and the others are named.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.contract.csr import SIGNER, USAGES, make_pkcs10
from tests.controllers.clusters import LIMIT_S, Place, make_controllers
from tests.controllers.rollout.agents import Agents
from tests.fixtures import hosted
from tests.fixtures.clusters import KUBECONFIG, open_lab
from tests.fixtures.controllers import CLOCK, open_client, run_controllers
from tests.fixtures.objects import make_object
from tests.waiting import wait_until
from treenail.api.annotations import BUILD_KEY
from treenail.controllers.handover.handover_objects import HANDOVER_SECRET
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.kube.api_client import Client
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.resources import (
    CERTIFICATESIGNINGREQUESTS,
    CONFIGMAPS,
    CONTAINERRUNTIMECONFIGS,
    CONTROLLERCONFIGS,
    CUSTOMRESOURCEDEFINITIONS,
    GENERATOR_SOURCES,
    JOBS,
    KUBELETCONFIGS,
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEHEALTHCHECKS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    OSIMAGESTREAMS,
    PINNEDIMAGESETS,
    PODDISRUPTIONBUDGETS,
    PODS,
    ROLLOUTPOLICIES,
    SECRETS,
    Resource,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = [pytest.mark.integration]
CONTROLLERS = ("render", "rollout", "drain", "build", "install", "approve")
ALL = (*CONTROLLERS, "machineconfignodes")
EVERY = {*ALL, "generate", "hosted", "nodepools"}
BUDGETS, REQUESTS = 64, 60
LARGE = 1_200_000


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[Place]:
    found = Place(kubeconfig, tmp_path, CONTROLLERS)
    try:
        found.install()
        yield found
    finally:
        found.remove()


def find_started() -> set[str]:
    """Return the controllers whose workers run."""
    threads = {thread.name.rpartition("-")[0] for thread in threading.enumerate()}
    return threads & EVERY


def make_budget(size: int) -> dict[str, Any]:
    """Make a budget for all pods, whose selector has this many characters."""
    values = [f"{number:063}" for number in range(size // 66)]
    selector = {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": values}]}
    return {"spec": {"minAvailable": 0, "selector": selector}}


def make_request(size: int) -> dict[str, Any]:
    """Make the request of a kubelet with an extension, of this many characters."""
    extension = x509.UnrecognizedExtension(
        x509.ObjectIdentifier("1.2.3.4"), b"x" * (size * 9 // 16)
    )
    pem = make_pkcs10("system:node:large", extensions=[extension])
    content = base64.b64encode(pem).decode()
    return {"spec": {"request": content, "signerName": SIGNER, "usages": [*USAGES]}}


def test_large_objects_of_users_stop_no_controller(place: Place, kubeconfig: Path) -> None:
    is_real = str(kubeconfig) == KUBECONFIG
    # The lab takes a second for four of them.
    budgets, requests = (BUDGETS, REQUESTS) if is_real else (6, 4)
    for number in range(budgets):
        place.create(PODDISRUPTIONBUDGETS, f"large-{number}", make_budget(LARGE))
    request = make_request(LARGE)
    for number in range(requests):
        place.create(CERTIFICATESIGNINGREQUESTS, f"{place.prefix}-{number}", request)
    nodes = {place.node(name) for name in ("n1", "n2")}
    place.config("00", kernelArguments=["a=1"])
    place.pool("{canary: {}, soak: 0s}")
    agents = Agents(place.client, drains=True, selector=place.prefix)
    with agents, place.controllers() as runtime:
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
        before = place.rendered()
        place.config("00", kernelArguments=["a=2"])
        wait_until(lambda: place.rendered() != before, limit_s=LIMIT_S)
        wait_until(lambda: place.at(place.rendered()) == nodes, limit_s=LIMIT_S)
        wait_until(lambda: find_started() == set(ALL), limit_s=LIMIT_S)
        # On a busy host one list may take longer than its limit.
        wait_until(lambda: not (runtime.degraded_reason or runtime.unready_reason), limit_s=LIMIT_S)


BLOCKED: dict[Resource, set[str]] = {
    NODES: {*ALL},
    MACHINECONFIGPOOLS: {
        "render", "generate", "rollout", "machineconfignodes", "build", "install", "approve",
    },
    MACHINECONFIGS: {"render", "generate"},
    CONTROLLERCONFIGS: {"render", "generate"},
    MACHINEOSCONFIGS: {"generate", "rollout", "build", "install"},
    MACHINEOSBUILDS: {"rollout", "build", "install"},
    ROLLOUTPOLICIES: {"rollout", "hosted"},
    **{
        resource: {"hosted", "nodepools"}
        for resource in (*hosted.HYPERSHIFT_KINDS, *hosted.CAPI_KINDS)
    },
    MACHINEHEALTHCHECKS: {"nodepools"},
    MACHINECONFIGNODES: {"machineconfignodes"},
    CERTIFICATESIGNINGREQUESTS: {"approve"},
    SECRETS: {"install"},
    JOBS: {"build"},
    PODS: {"build"},
    PODDISRUPTIONBUDGETS: set(),
    CONFIGMAPS: set(),
    **{resource: {"generate"} for resource in GENERATOR_SOURCES},
    KUBELETCONFIGS: {"render", "generate"},
    CONTAINERRUNTIMECONFIGS: {"render", "generate"},
    OSIMAGESTREAMS: {"render"},
    PINNEDIMAGESETS: set(),
}  # fmt: skip
"""The controllers that a kind stops, of which one object is too large."""
METADATA_ONLY = (SECRETS, CONFIGMAPS, PINNEDIMAGESETS)
NAMESPACE = "treenail"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    with open_lab(tmp_path_factory.mktemp("large")) as (server, client):
        for document in installation.load_crds("crds/generate"):
            client.create(CUSTOMRESOURCEDEFINITIONS, document)
        hosted.install_hosted_kinds(client)
        yield server


@contextmanager
def store_large_object(server: LabServer, resource: Resource) -> Iterator[str]:
    """Store an object that all views of the kind select, of more bytes than the test allows."""
    storage = (resource.group, resource.plural)
    name = HANDOVER_SECRET if resource is SECRETS else "large"
    where = {"namespace": NAMESPACE} if resource.namespaced else {}
    labels = {BUILD_KEY: "x"} if resource in (JOBS, PODS) else {}
    fill = "x" * 40_000
    annotations = {"example.com/fill": fill} if resource in METADATA_ONLY else {}
    metadata = {"labels": labels, "annotations": annotations, "uid": "uid-large", **where}
    document = make_object(resource, name, {"signerName": SIGNER, "fill": fill}, **metadata)
    server.call_api(lambda api: api.store.put_object(storage, document))
    try:
        yield " -n ".join((name, *where.values()))
    finally:
        key = (where.get("namespace", ""), name)
        server.call_api(lambda api: api.store.remove_object(storage, key))


@pytest.mark.parametrize("resource", BLOCKED, ids=lambda resource: resource.plural)
def test_kind_with_an_object_that_is_too_large_stops_only_who_requires_it(
    lab: LabServer, resource: Resource
) -> None:
    transport = HttpTransport(read_kubeconfig(str(lab.admin_kubeconfig)), CLOCK, max_kept=16)
    with closing(transport):
        client = Client(transport, page_bytes=4_000)
        metrics = ControllerMetrics()
        known = make_controllers(client, EventRecorder(client, "a", "a", CLOCK), metrics, NAMESPACE)
        controllers = [each for found in known.values() for each in found]
        with (
            store_large_object(lab, resource) as key,
            run_controllers(client, *controllers, metrics=metrics) as runtime,
        ):
            expected = EVERY - BLOCKED[resource]
            wait_until(
                lambda: find_started() == expected and resource.plural in runtime.degraded_reason
            )
            is_named = resource not in METADATA_ONLY
            text = (
                f"kubectl delete {resource.plural} {key}"
                if is_named
                else "the response is longer than"
            )
            assert f"degraded: {resource.plural}: " in runtime.degraded_reason
            assert text in runtime.degraded_reason
            assert bool(runtime.unready_reason) == (not expected)
            line = f'watch_degraded{{resource="{resource.plural}"}} 1.0'
            assert line in metrics.render_text()


def test_table_has_every_watched_kind(lab: LabServer) -> None:
    with open_client(lab.admin_kubeconfig) as client:
        metrics = ControllerMetrics()
        known = make_controllers(client, EventRecorder(client, "a", "a", CLOCK), metrics, NAMESPACE)
        with run_controllers(client, *(each for found in known.values() for each in found)) as it:
            wait_until(lambda: find_started() == EVERY)
            assert {*it._informers.plurals} == {resource.plural for resource in BLOCKED}
