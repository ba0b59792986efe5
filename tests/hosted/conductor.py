"""treenail's controllers beside a hosted cluster, and the objects that they read."""

import base64
import os
from pathlib import Path

from tests.fixtures import hosted
from tests.fixtures.objects import Json, install_kinds, make_object
from tests.hosted.clusters import HostedClusters
from tests.hosted.processes import LoggedProcess
from treenail.api.hosted import annotations as hosted_key
from treenail.kube.resources import (
    HOSTEDCLUSTERS,
    NAMESPACES,
    NODEPOOLS,
    ROLLOUTPOLICIES,
    SECRETS,
)
from treenail_lab.controllers import CONTROLLER_COMMAND

USER = "treenail"
"""The user as which treenail sends its requests."""
FIELD_MANAGER = "treenail-hosted"


def create_objects(clusters: HostedClusters) -> None:
    """Create what treenail reads beside pools, once for both clusters."""
    install_kinds(clusters.management)
    clusters.management.create(NAMESPACES, make_object(NAMESPACES, "treenail"))
    hosted.add_object(clusters.management, HOSTEDCLUSTERS, hosted.make_hosted_cluster())
    data = {"kubeconfig": base64.b64encode(clusters.guest_kubeconfig.read_bytes()).decode()}
    secret = make_object(SECRETS, "admin-kubeconfig", top={"data": data})
    clusters.management.create(SECRETS, secret, namespace=hosted.CONTROL_PLANE)


def create_pool(
    clusters: HostedClusters, name: str, upgrade_type: str, limit: int, policy: Json, **spec: object
) -> None:
    """Create a NodePool of treenail's, and its RolloutPolicy of the same name."""
    clusters.management.create(ROLLOUTPOLICIES, make_object(ROLLOUTPOLICIES, name, policy))
    notes = {hosted_key.ROLLOUT_POLICY: name, "treenail.io/max-unavailable": str(limit)}
    document = hosted.make_node_pool(name, upgrade_type, annotations=notes, **spec)
    hosted.add_object(clusters.management, NODEPOOLS, document)


def run_conductor(clusters: HostedClusters, directory: Path) -> LoggedProcess:
    """Return treenail's controllers in the management cluster."""
    command: list[str | Path] = [
        *CONTROLLER_COMMAND,
        "run",
        "--enable=hosted",
        f"--kubeconfig={clusters.write_user(USER)}",
        "--metrics=127.0.0.1:0",
    ]
    environment = {
        **os.environ,
        "POD_NAME": "treenail-controller-0",
        "POD_NAMESPACE": "treenail",
    }
    return LoggedProcess(command, directory / "treenail.log", environment)
