"""treenail takes over a cluster whose generated MachineConfigs the MCO wrote, and hands it back.

Two objects of each kind for a built-in pool and a custom one get their names from the real
machine-config-controller. Then treenail's controllers run in its place, and after them it again.
The nodes are objects alone: that nothing writes to them is what the test is about.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.generated import random_policies, runtime_objects
from tests.config.generated.kubelet_objects import BASE
from tests.contract.client import Cluster
from tests.mco import bootstrap, nodes, operator, programs
from tests.mco.operator import CONFIG, MCO, ROLE
from tests.realcluster import RealCluster, RealClusterError, find_programs
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.ignition.parser import parse_ignition
from treenail.config.generated import kubelet
from treenail.manifests import installation
from treenail.process import stop_process
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.lifetime.owner import owner

pytestmark = [pytest.mark.integration, pytest.mark.limit(800)]

Json = dict[str, Any]

POOLS = {"n1": "worker", "n2": "infra"}
"""The pool of each node."""
CONTROLLERS = ("render", "rollout", "drain", "generate")
OPERATOR_ALPHA = "/apis/operator.openshift.io/v1alpha1"
RELEASE = "registry.lab.example/release@sha256:" + "0" * 64
TEMPLATES = {**runtime_objects.BASE, kubelet.KUBELET_CONF: BASE}
GENERATED = {
    f"99-{pool}-generated-{end}{suffix}"
    for pool in POOLS.values()
    for end in ("kubelet", "containerruntime")
    for suffix in ("", "-1")
} | {"99-worker-generated-registries"}
REGISTRIES = [
    f"r{number}.example/{end}"
    for number in range(2)
    for end in ("imagedigestmirrorset", "imagetagmirrorset", "imagecontentsourcepolicy", "app")
] + ["signed0.example", "signed1.example"]
LIMIT_S = 120.0


class TwoOperators:
    """A cluster with the controllers of either operator."""

    def __init__(self, server: RealCluster, directory: Path) -> None:
        self.cluster = Cluster.of_kubeconfig(server.kubeconfig)
        self._server = server
        self._mco = operator.Controller(directory, server.kubeconfig)
        self._mco_log_size = 0
        self._log = directory / "treenail-controller.log"
        self._treenail: subprocess.Popen[bytes] | None = None
        bootstrap.write_templates(directory / "templates", TEMPLATES)

    def create(self) -> None:
        """Create what the MCO's operator, the installer and the manifests of treenail create."""
        features = ["SigstoreImageVerification", "SigstoreImageVerificationPKI"]
        operator.create_objects(
            self.cluster, self._mco.read_version(), self._server.authority, features
        )
        self._create_release()
        self.create_object(f"{CONFIG}/images", runtime_objects.build_image_config())
        for name, roles in (("worker", ["worker"]), ("infra", ["worker", "infra"])):
            requirement = {"key": ROLE, "operator": "In", "values": roles}
            pool = operator.build_pool(
                name, machineConfigSelector={"matchExpressions": [requirement]}
            )
            if name == "worker":
                pool["metadata"]["labels"][key.BUILT_IN_POOL] = ""
            self.create_object(f"{MCO}/machineconfigpools", pool)
        options = installation.InstallOptions(controllers=CONTROLLERS)
        self.account = f"system:serviceaccount:{options.namespace}:{installation.NAME}"
        self.cluster.post("/api/v1/namespaces", {"metadata": {"name": options.namespace}}).ok()
        for document in installation.build_documents(options):
            is_own_kind = str(document["metadata"]["name"]).endswith("treenail.io")  # type: ignore[index,call-overload]
            if is_own_kind and document["kind"] == "CustomResourceDefinition":
                self.cluster.post(operator.DEFINITIONS, document).ok()
            elif "rbac" in str(document["apiVersion"]):
                self.cluster.post(nodes.find_collection(document), document).ok()

    def create_object(self, path: str, document: Json) -> None:
        self.cluster.post(path, document).ok()

    def create_nodes(self) -> None:
        """Create a node for each pool, which says that it has the config of the pool."""
        for node, pool in POOLS.items():
            target = self.read_targets()[pool]
            nodes.create_node(self.cluster, node, pool)
            nodes.report_ready(self.cluster, node, is_ready=True, boot_id="1")
            drain = f"uncordon-{target}"
            notes = {key.CURRENT_CONFIG: target, key.DESIRED_CONFIG: target, key.STATE: "Done",
                     key.DESIRED_DRAIN: drain, key.LAST_APPLIED_DRAIN: drain}  # fmt: skip
            self.cluster.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": notes}}).ok()

    # The operators

    def start_mco(self) -> None:
        self._mco_log_size = self._mco.log.stat().st_size if self._mco.log.exists() else 0
        self._mco.start()

    def stop_mco(self) -> None:
        self._mco.stop()

    def read_mco_log(self) -> str:
        """Return what the MCO logged since its last start."""
        return self._mco.log.read_text("utf-8")[self._mco_log_size :]

    def start_treenail(self) -> None:
        account = self._server.write_kubeconfig(self.account, ("system:serviceaccounts",))
        command = [
            *CONTROLLER_COMMAND,
            "run",
            f"--enable={','.join(CONTROLLERS)}",
            f"--kubeconfig={account}",
            "--metrics=127.0.0.1:0",
            "--settle=0.2",
        ]
        pod = {"POD_NAME": "treenail-controller-0", "POD_NAMESPACE": "treenail"}
        with self._log.open("ab") as log:
            self._treenail = subprocess.Popen(
                command,
                env={**os.environ, **owner.mark_environment(), **pod},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop_treenail(self) -> None:
        if self._treenail is not None:
            stop_process(self._treenail, 30.0)
        self._treenail = None

    # Observations

    def list_objects(self, path: str) -> dict[str, Json]:
        items = self.cluster.get(path).ok()["items"]
        return {item["metadata"]["name"]: item for item in items}

    def read_targets(self) -> dict[str, str]:
        """Return the rendered config that each pool requires."""
        pools = self.list_objects(f"{MCO}/machineconfigpools")
        return {
            name: pool["spec"].get("configuration", {}).get("name", "")
            for name, pool in pools.items()
        }

    def read_sources(self, pool: str) -> set[str]:
        found = self.list_objects(f"{MCO}/machineconfigpools")[pool]
        source = found["spec"].get("configuration", {}).get("source") or []
        return {entry["name"] for entry in source}

    def read_conditions(self, pool: str) -> dict[str, str]:
        found = self.list_objects(f"{MCO}/machineconfigpools")[pool].get("status", {})
        return {entry["type"]: entry["status"] for entry in found.get("conditions") or []}

    def read_origins(self) -> dict[str, str]:
        """Return the objects that each generated MachineConfig names."""
        configs = self.list_objects(f"{MCO}/machineconfigs")
        return {
            name: config["metadata"].get("annotations", {}).get(key.GENERATED_FROM, "")
            for name, config in configs.items()
            if name in GENERATED
        }

    def has_all_registries(self) -> bool:
        """Return whether the pools have the registries of both objects of each kind."""
        targets = self.read_targets()
        configs = self.list_objects(f"{MCO}/machineconfigs")
        wanted = read_texts(configs["99-worker-generated-registries"])
        rendered = [read_texts(configs[targets[pool]]) for pool in POOLS.values()]
        return all(text in "".join(wanted) for text in REGISTRIES) and all(
            wanted <= texts for texts in rendered
        )

    def is_updated(self) -> bool:
        return all(self.read_conditions(pool).get("Updated") == "True" for pool in POOLS.values())

    def has_settled_nodes(self) -> bool:
        """Return whether the MCO has written its last annotation on the new nodes."""
        name = f"{operator.GROUP}/controlPlaneTopology"
        nodes = self.list_objects("/api/v1/nodes").values()
        return all(name in node["metadata"]["annotations"] for node in nodes)

    def take_snapshot(self, *, has_versions: bool = True) -> dict[str, Any]:
        """Return what neither a takeover nor a handback may change, without status.

        ``has_versions`` includes the versions of the Nodes, which any write changes.
        """
        configs = self.list_objects(f"{MCO}/machineconfigs")
        found: dict[str, Any] = {
            name: (config["metadata"]["uid"], config["metadata"]["generation"], config["spec"])
            for name, config in configs.items()
        }
        found |= {f"target of {pool}": name for pool, name in self.read_targets().items()}
        for name, node in self.list_objects("/api/v1/nodes").items():
            metadata = node["metadata"]
            found |= {f"{name}: {field}": text for field, text in metadata["annotations"].items()}
            found |= {f"{name}: labels": metadata["labels"], f"{name}: spec": node["spec"]}
            if has_versions:
                found[f"{name}: version"] = metadata["resourceVersion"]
        return found

    def read_story(self) -> str:
        texts = [log.read_text("utf-8", "replace")[-6000:] for log in (self._log, self._mco.log)
                 if log.exists()]  # fmt: skip
        return "\n".join(texts)

    def _create_release(self) -> None:
        """Create the ClusterVersion: without one the MCO writes no registries."""
        version = {
            "apiVersion": "config.openshift.io/v1",
            "kind": "ClusterVersion",
            "metadata": {"name": "version"},
            "spec": {"clusterID": "11111111-1111-1111-1111-111111111111"},
        }
        self.create_object(f"{CONFIG}/clusterversions", version)
        status = {
            "desired": {"image": RELEASE, "version": operator.VERSION},
            "observedGeneration": 1,
            "versionHash": "",
            "availableUpdates": [],
        }
        self.cluster.patch(f"{CONFIG}/clusterversions/version/status", {"status": status}).ok()


def build_pool_objects() -> list[tuple[str, Json]]:
    """Build two objects for each pool of the kinds that select pools, with their collections."""
    documents = []
    for pool in POOLS.values():
        for number, (spec, runtime) in enumerate(
            [
                ({"kubeletConfig": {"maxPods": 100}}, {"pidsLimit": 2048, "overlaySize": "8G"}),
                ({"kubeletConfig": {"podPidsLimit": 1024}, "autoSizingReserved": True},
                 {"logLevel": "debug", "defaultRuntime": "crun"}),
            ]
        ):  # fmt: skip
            name = f"{pool}-{number}"
            document = runtime_objects.build_runtime(name, pool, **runtime)
            documents.append((f"{MCO}/containerruntimeconfigs", document))
            selector = {"machineConfigPoolSelector": {"matchLabels": {"test": pool}}}
            kubelet_config = {
                "apiVersion": f"{operator.GROUP}/v1",
                "kind": "KubeletConfig",
                "metadata": {"name": name},
                "spec": {**spec, **selector},
            }
            documents.append((f"{MCO}/kubeletconfigs", kubelet_config))
    return documents


def build_cluster_objects() -> list[tuple[str, Json]]:
    """Build two objects of each kind for all pools, with their collections."""
    documents = []
    collections = {
        "ImageDigestMirrorSet": f"{CONFIG}/imagedigestmirrorsets",
        "ImageTagMirrorSet": f"{CONFIG}/imagetagmirrorsets",
        "ImageContentSourcePolicy": f"{OPERATOR_ALPHA}/imagecontentsourcepolicies",
    }
    for number in range(2):
        for kind, path in collections.items():
            source = f"r{number}.example/{kind.lower()}"
            mirrors = [f"m{mirror}.example/{kind.lower()}" for mirror in range(number + 1)]
            entry = runtime_objects.build_entry(source, *mirrors)
            documents.append(
                (path, runtime_objects.build_mirrors(f"set-{number}", entry, kind=kind))
            )
        policy = random_policies.make_policy(
            "ClusterImagePolicy", f"policy-{number}", [f"signed{number}.example"]
        )
        documents.append((f"{CONFIG}/clusterimagepolicies", policy))
        policy = random_policies.make_policy(
            "ImagePolicy", f"policy-{number}", [f"r{number}.example/app"], "default"
        )
        documents.append((f"{CONFIG}/namespaces/default/imagepolicies", policy))
    return documents


def read_texts(config: Json) -> set[str]:
    """Return the texts of all files of a MachineConfig."""
    files = parse_ignition(config["spec"]["config"]).files
    return {file.contents.decode_bytes().decode() for file in files}


@pytest.fixture
def site() -> Iterator[TwoOperators]:
    programs.CONTROLLER.read()
    kinds = programs.KINDS.read()
    try:
        found = find_programs(os.environ)
    except RealClusterError as error:
        pytest.skip(str(error))
    with (
        RealCluster(found, watches_nodes=False) as server,
        owner.temporary_directory() as directory,
    ):
        site = TwoOperators(server, directory)
        operator.install_kinds(site.cluster, kinds)
        try:
            site.create()
            yield site
        except BaseException:
            sys.stdout.write(site.read_story())
            raise
        finally:
            site.stop_treenail()
            site.stop_mco()


def test_takeover_and_handback_change_no_config_and_no_node(site: TwoOperators) -> None:
    try:
        check_takeover(site)
    except BaseException:
        sys.stdout.write(site.read_story())
        raise


def check_takeover(site: TwoOperators) -> None:
    site.start_mco()
    for pool in POOLS.values():
        base = f"98-{pool}-generated-kubelet"
        wait_until(lambda base=base, pool=pool: base in site.read_sources(pool), limit_s=LIMIT_S)
    pool_objects = build_pool_objects()
    for path, document in [*pool_objects, *build_cluster_objects()]:
        site.create_object(path, document)
        if (path, document) in pool_objects:
            # Of several new objects the MCO gives the first one a number too.
            name = document["metadata"]["name"]
            wait_until(
                lambda path=path, name=name: site.cluster.get(f"{path}/{name}").ok().get("status"),
                limit_s=LIMIT_S,
            )
    expected = {name for name in GENERATED if "worker" in name}
    wait_until(lambda: expected <= site.read_sources("worker"), limit_s=LIMIT_S)
    wait_until(lambda: site.read_sources("infra") >= GENERATED, limit_s=LIMIT_S)
    wait_until(site.has_all_registries, limit_s=LIMIT_S)
    site.create_nodes()
    wait_until(site.is_updated, limit_s=LIMIT_S)
    wait_until(site.has_settled_nodes, limit_s=LIMIT_S)
    before = site.take_snapshot()
    assert set(before) >= GENERATED
    site.stop_mco()

    site.start_treenail()
    wait_until(lambda: all(site.read_origins().values()), limit_s=LIMIT_S)
    for pool in POOLS.values():
        wait_until(
            lambda pool=pool: site.read_conditions(pool).get("Reconciling") == "False",
            limit_s=LIMIT_S,
        )
    assert site.read_origins()["99-worker-generated-kubelet-1"] == "KubeletConfig/worker-1"
    assert site.take_snapshot() == before
    site.stop_treenail()
    assert site.take_snapshot() == before

    before = site.take_snapshot(has_versions=False)
    site.start_mco()
    wait_until(lambda: has_synced(site.read_mco_log()), limit_s=LIMIT_S)
    wait_until(site.is_updated, limit_s=LIMIT_S)
    after = site.take_snapshot(has_versions=False)
    changes = {name: (before.get(name), text) for name, text in after.items()
               if before.get(name) != text}  # fmt: skip
    assert before.keys() <= after.keys()
    assert changes == {}


def has_synced(log: str) -> bool:
    """Return whether the MCO has read every object again, and rendered the pools."""
    begins = [
        *(f'Finished syncing kubeletconfig "{pool}-{number}"' for pool in POOLS.values()
          for number in range(2)),
        *(f'Finished syncing ContainerRuntimeconfig "{pool}-{number}"' for pool in POOLS.values()
          for number in range(2)),
        "Finished syncing ImageConfig",
        *(f'Finished syncing machineconfigpool "{pool}"' for pool in POOLS.values()),
    ]  # fmt: skip
    return all(begin in log for begin in begins)
