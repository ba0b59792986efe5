"""The commands of the documents, with the kubectl of this machine or that of KUBECTL."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Cluster
from tests.fixtures.clusters import REAL
from tests.fixtures.objects import collection_of
from treenail.manifests.installation import NAME, InstallOptions, build_documents

KUBECTL = os.environ.get("KUBECTL") or shutil.which("kubectl") or ""
COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
MCO = "/apis/machineconfiguration.openshift.io/v1"
POLICIES = "/apis/treenail.io/v1alpha1/rolloutpolicies"
_LIMIT_S = 50.0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not KUBECTL, reason="no kubectl here, and KUBECTL is not set"),
]


class User:
    """Types commands; all that it creates has its name."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self.admin = Cluster.of_kubeconfig(kubeconfig)
        self.name = f"treenail-test-{secrets.token_hex(3)}"

    def kubectl(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [KUBECTL, f"--kubeconfig={self._kubeconfig}", *words],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )

    def run(self, *words: str, stdin: str = "") -> list[str]:
        """Run kubectl and return the lines of its output; fail if it fails."""
        found = self.kubectl(*words, stdin=stdin)
        assert found.returncode == 0, found.stderr
        return found.stdout.splitlines()

    def print_manifests(self) -> str:
        paths = os.pathsep.join(filter(None, sys.path))
        return subprocess.run(
            [sys.executable, "-c", COMMAND, "manifests", "--namespace", self.name],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        ).stdout

    def create_pool(self) -> None:
        """Create a pool that selects nothing, a policy and a node's object, with status."""
        selector = {"matchLabels": {self.name: ""}}
        pool = {"machineConfigSelector": selector, "nodeSelector": selector}
        node = {"name": self.name}
        spec = {"node": node, "pool": node, "configVersion": {"desired": "rendered-2"}}
        self._create(f"{MCO}/machineconfigpools", "MachineConfigPool", pool)
        self._create(f"{MCO}/machineconfignodes", "MachineConfigNode", spec)
        self._create(POLICIES, "RolloutPolicy", {"canary": {}})
        self.write_status(
            f"{MCO}/machineconfigpools",
            {
                "configuration": {"name": "rendered-2"},
                "machineCount": 3,
                "readyMachineCount": 2,
                "updatedMachineCount": 1,
                "degradedMachineCount": 0,
                "conditions": [
                    {"type": "Updated", "status": "False"},
                    {"type": "Updating", "status": "True"},
                    {"type": "Degraded", "status": "False"},
                ],
            },
        )

    def write_status(self, collection: str, status: dict[str, Any]) -> None:
        self.admin.patch(f"{collection}/{self.name}/status", {"status": status}).ok()

    def _create(self, collection: str, kind: str, spec: dict[str, Any]) -> None:
        document = {
            "apiVersion": collection.removeprefix("/apis/").rpartition("/")[0],
            "kind": kind,
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.admin.post(collection, document).ok()

    def remove(self) -> None:
        for collection in (f"{MCO}/machineconfigpools", f"{MCO}/machineconfignodes", POLICIES):
            self.admin.delete(f"{collection}/{self.name}")
        # The kinds and the access of agents are shared with other tests.
        for document in build_documents(InstallOptions(namespace=self.name)):
            if NAME in document["metadata"]["name"] or document["kind"] == "Namespace":  # type: ignore[index,operator]  # a dict
                self.admin.delete(f"{collection_of(document)}/{document['metadata']['name']}")  # type: ignore[index]  # a dict


@pytest.fixture
def user(kubeconfig: Path) -> Iterator[User]:
    found = User(kubeconfig)
    yield found
    found.remove()


@pytest.fixture
def installed(shared_kubeconfig: Path) -> Iterator[User]:
    """A user of a cluster with the kinds, and a pool."""
    found = User(shared_kubeconfig)
    try:
        found.create_pool()
        yield found
    finally:
        found.remove()


@pytest.fixture(params=[REAL])
def real_user(request: pytest.FixtureRequest) -> Iterator[User]:
    """As `installed`, but on the real cluster only: the lab has no printer columns."""
    found = User(request.getfixturevalue("real_kubeconfig"))
    try:
        found.create_pool()
        yield found
    finally:
        found.remove()


SERVER_SIDE = ("apply", "--server-side", "-f", "-")
CLIENT_SIDE = ("apply", "-f", "-")


def test_manifests_applied_twice_are_unchanged(user: User) -> None:
    manifests = user.print_manifests()
    user.run(*CLIENT_SIDE, stdin=manifests)
    again = user.run(*CLIENT_SIDE, stdin=manifests)
    assert len(again) == len(build_documents(InstallOptions()))
    # kubectl always sends the selector of a PodDisruptionBudget, which changes nothing.
    assert [line for line in again if not line.endswith(" unchanged")] in (
        [],
        ["poddisruptionbudget.policy/treenail-controller configured"],
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [(CLIENT_SIDE, SERVER_SIDE), (SERVER_SIDE, CLIENT_SIDE)],
    ids=["client-side first", "server-side first"],
)
def test_both_kinds_of_apply_of_manifests_do_not_conflict(
    user: User, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    manifests = user.print_manifests()
    for command in (first, second):
        lines = user.run(*command, stdin=manifests)
        assert len(lines) == len(build_documents(InstallOptions()))


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("windows", '[{"day": ["Sat"], "start": "01:00", "duration": "4h", "timeZone": "UTC"}]',
         "spec.windows[0].day"),
        ("canary", '{"nodeselector": {}}', "spec.canary.nodeselector"),
    ],
)  # fmt: skip
def test_nested_typo_in_a_policy_is_refused(
    installed: User, field: str, value: str, path: str
) -> None:
    document = f"""
apiVersion: treenail.io/v1alpha1
kind: RolloutPolicy
metadata: {{name: {installed.name}-typo}}
spec: {{{field}: {value}}}
"""
    found = installed.kubectl(*CLIENT_SIDE, stdin=document)
    assert found.returncode != 0
    assert f'unknown field "{path}"' in found.stderr
    assert installed.admin.get(f"{POLICIES}/{installed.name}-typo").code == 404


def test_wait_for_condition_of_a_pool_ends_with_it(installed: User) -> None:
    pool = f"mcp/{installed.name}"
    installed.run("wait", pool, "--for=condition=Updating", "--timeout=20s")
    late = installed.kubectl("wait", pool, "--for=condition=Updated", "--timeout=1s")
    assert late.returncode == 1
    assert "timed out waiting for the condition" in late.stderr
    installed.write_status(
        f"{MCO}/machineconfigpools", {"conditions": [{"type": "Updated", "status": "True"}]}
    )
    installed.run("wait", pool, "--for=condition=Updated", "--timeout=20s")


def test_resume_of_a_policy_can_be_patched(installed: User) -> None:
    patch = '{"spec": {"resume": {"worker": "1"}}}'
    installed.run("patch", "rolloutpolicy", installed.name, "--type", "merge", "-p", patch)
    found = installed.admin.get(f"{POLICIES}/{installed.name}").ok()
    assert found["spec"] == {"canary": {}, "resume": {"worker": "1"}}


def read_row(user: User, kind: str) -> dict[str, str]:
    """Return one object's row of ``kubectl get`` by column."""
    header, row = user.run("get", kind, user.name)
    starts = [match.start() for match in re.finditer(r"(?<!\S)(?<!\S )\S", header)]
    columns = zip(starts, [*starts[1:], None], strict=True)
    return {header[start:end].strip(): row[start:end].strip() for start, end in columns}


def test_columns_of_a_pool_show_its_status(real_user: User) -> None:
    row = read_row(real_user, "mcp")
    age = row.pop("AGE")
    assert age.endswith("s")
    assert row == {
        "NAME": real_user.name,
        "CONFIG": "rendered-2",
        "UPDATED": "False",
        "UPDATING": "True",
        "DEGRADED": "False",
        "MACHINECOUNT": "3",
        "READYMACHINECOUNT": "2",
        "UPDATEDMACHINECOUNT": "1",
        "DEGRADEDMACHINECOUNT": "0",
    }


def test_columns_of_a_policy_show_all_pools(real_user: User) -> None:
    pools = [
        {"pool": "infra", "state": "Updated", "nextWindow": "2026-11-28T01:00:00Z"},
        {"pool": "worker", "state": "Halted", "haltedBy": {"node": "n1", "reason": "x"}},
    ]
    summary = "infra Updated, worker Halted by n1"
    real_user.write_status(POLICIES, {"pools": pools, "summary": summary})
    row = read_row(real_user, "rolloutpolicy")
    assert (row["NEXT WINDOW"], row["POOLS"]) == ("2026-11-28T01:00:00Z", summary)


def test_columns_of_a_machineconfignode_show_its_configs(real_user: User) -> None:
    row = read_row(real_user, "machineconfignode")
    assert (row["POOLNAME"], row["DESIREDCONFIG"]) == (real_user.name, "rendered-2")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rolloutpolicy.spec.windows", "Times in which nodes may be drained."),
        ("rolloutpolicy.spec.canary.nodes", "A count of nodes, or a percentage from 1% to 100%."),
        ("mcp.spec.paused", "Assign no target to any node."),
        ("machineosconfig.spec.renderedImagePushSpec", "Where images are pushed to"),
        ("machineosconfig.spec.containerFile", "What to add to the image"),
        ("machineosbuild.status.digestedImagePushSpec", "The pushed image, by digest."),
    ],
)
def test_fields_are_explained(real_user: User, path: str, text: str) -> None:
    assert text in " ".join(" ".join(real_user.run("explain", path)).split())
