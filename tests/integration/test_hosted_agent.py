"""The agent of a hosted node updates to the config that a ConfigMap of its NodePool delivers."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.dying_ledger import ORDER
from tests.fixtures.objects import make_object
from tests.integration.hosted_site import (
    MODE,
    NAMESPACE,
    OLD,
    HostedSite,
    make_config,
    make_payload,
    read_config_name,
)
from tests.integration.site import NODE
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted.node_mode import PATH
from treenail.config import node_paths
from treenail.daemon.cluster.hosted_client import MCD_CONFIG, read_mode
from treenail.errors import UsageError
from treenail.host.filesystem.root_directory import Root
from treenail.kube.resources import NODES, PODS
from treenail_lab.lifetime.interpreter import PYTHON_MODULE

pytestmark = pytest.mark.integration

APP, GONE, FREE = "/etc/app.conf", "/etc/gone.conf", "/etc/nmstate/openshift/net.yml"
SERVED = {APP: "0", GONE: "0"}
H1, H2 = "1" * 16, "2" * 16
OpenSite = Callable[..., HostedSite]


@pytest.fixture
def open_site() -> Iterator[OpenSite]:
    """Open sites that end with the test."""
    with ExitStack() as exits:

        def open_one(**options: object) -> HostedSite:
            site = HostedSite(SERVED, **options)  # type: ignore[arg-type]  # of the test
            exits.callback(site.stop)
            exits.callback(lambda: print(site.story()))  # noqa: T201  # shown if the test failed
            return site

        yield open_one


@pytest.fixture
def site(open_site: OpenSite) -> HostedSite:
    """A machine that HyperShift installed, and that was never updated in place."""
    return open_site()


def test_machine_of_hypershift_updates_from_its_served_config(site: HostedSite) -> None:
    assert site.notes().get(key.CURRENT_CONFIG) is None
    site.update(H1, {APP: "1"})
    site.wait_done(H1)
    # The target does not list the file of the served config.
    assert (site.text(APP), site.text(GONE)) == ("1", None)
    assert site.machine.boot_count == site.boots + 1
    assert site.list_values(key.DESIRED_DRAIN) == ["", f"drain-{H1}", f"uncordon-{H1}"]
    before, after = site.find_sight(H1)
    changed = after.changes(before)
    assert {"state", "currentConfig", "desiredDrain"} <= changed, changed
    assert after.notes[key.STATE] == key.NodeState.DONE
    assert before.drained
    assert after.phase == "uncordoning"
    assert site.list_values(key.STATE)[-1] == key.NodeState.DONE
    # A Machine Config Daemon that follows begins with the same config.
    assert read_config_name(site, MCD_CONFIG) == H1
    # The agent of the image says in which boots it runs, so that the upgrader sends no pod.
    boots = site.list_values(hosted_key.SERVICE_BOOT)
    assert boots[-1] == site.machine.boot_id
    assert len({*boots} - {""}) == 2
    site.update(H2, {APP: "2", FREE: "2"})
    site.wait_done(H2)
    assert read_config_name(site, MCD_CONFIG) == H2


def test_machine_of_treenail_is_at_its_first_target(open_site: OpenSite) -> None:
    site = open_site(first={key.CURRENT_CONFIG: OLD, key.DESIRED_CONFIG: OLD, key.STATE: "Done"})
    site.wait_done(OLD)
    assert site.machine.boot_count == site.boots
    assert not site.was_cordoned()
    site.update(H1, {APP: "0", FREE: "1"})
    site.wait_done(H1)
    assert (site.text(GONE), site.text(FREE)) == (None, "1")


def test_names_of_an_ignition_payload_are_no_first_target(open_site: OpenSite) -> None:
    names = dict.fromkeys((key.CURRENT_CONFIG, key.DESIRED_CONFIG), "rendered-master-1")
    site = open_site(first=names)
    site.update(H1, {APP: "0", GONE: "0", FREE: "1"})
    site.wait_done(H1)
    assert site.list_values(key.CURRENT_CONFIG) == ["", H1]
    # The served config is the origin: nothing else differs.
    assert not site.was_cordoned()
    assert site.machine.boot_count == site.boots


def test_machine_of_another_agent_begins_at_its_config(open_site: OpenSite) -> None:
    """The Machine Config Daemon updated the machine in place before."""
    text = json.dumps(make_config("rendered-master-7", {APP: "0"}))
    site = open_site(files={MCD_CONFIG: text, APP: "0"}, notes={key.CURRENT_CONFIG: "0a0b0c0d"})
    site.update(H1, {APP: "0", FREE: "1"})
    site.wait_done(H1)
    assert not site.was_cordoned()
    # The daemon's config does not own it.
    assert site.text(GONE) == "0"


def test_new_target_replaces_the_one_in_flight(site: HostedSite) -> None:
    with site.drains_held():
        site.update(H1, {APP: "1"})
        site.wait_note(key.DESIRED_DRAIN, f"drain-{H1}")
        site.deliver(H2, {APP: "2"})
        site.select(H2)
        wait_until(lambda: site.phase() == "" or "cancel" in site.phase(), limit_s=30.0)
    site.wait_done(H2)
    assert site.text(APP) == "2"
    assert site.list_values(key.CURRENT_CONFIG) == ["", H2]


def test_config_of_another_hash_is_not_applied(site: HostedSite) -> None:
    """The upgrader writes the ConfigMap before the Node, and a retry may come late."""
    site.deliver(H1, {APP: "1"})
    site.select(H2)
    site.wait_note(key.STATE, "Working")
    wait_until(lambda: f"has '{H1}'" in site.notes()[key.REASON], limit_s=30.0)
    assert (site.text(APP), site.phase()) == ("0", "staging")
    site.deliver(H2, {APP: "2"})
    site.wait_done(H2)
    assert not site.was(key.NodeState.DEGRADED)
    assert site.text(APP) == "2"


def test_cut_payload_changes_nothing_and_a_new_target_follows(site: HostedSite) -> None:
    payload = make_payload(make_config("x", {APP: "1"}))
    site.update(H1, {}, config=payload[: len(payload) // 8 * 4])
    site.wait_degraded(MODE.config_map, "expected gzip in base64", "kubectl delete configmap")
    assert site.text(APP) == "0"
    site.update(H2, {APP: "2"})
    site.wait_done(H2)


def test_refresh_writes_without_a_drain_and_refuses_a_reboot(site: HostedSite) -> None:
    site.update(H1, {**SERVED, FREE: "1"}, mode="refresh")
    site.wait_done(H1)
    assert site.text(FREE) == "1"
    site.update(H2, {**SERVED, APP: "2"}, mode="refresh")
    site.wait_degraded(f"cannot refresh to {H2}", "reboot", APP)
    assert not site.was_cordoned()
    assert site.text(APP) == "0"
    site.deliver(H2, {**SERVED, APP: "2"})
    site.wait_done(H2)
    assert site.text(APP) == "2"


def test_shown_config_of_the_node_replaces_no_target(site: HostedSite) -> None:
    """A user of the guest claims that the node has the target: what is on disk is not it."""
    site.update(H1, {**SERVED, FREE: "1"})
    site.wait_done(H1)
    site.annotate({key.CURRENT_CONFIG: H2, key.DESIRED_CONFIG: H2})
    # As after a restore of etcd: the machine knows what it had.
    site.wait_note(key.DESIRED_CONFIG, H1)
    site.wait_done(H1)
    assert site.text(FREE) == "1"
    site.update(H2, {**SERVED, FREE: "2"})
    site.wait_done(H2)
    assert site.text(FREE) == "2"


@pytest.mark.parametrize("name", [*key.IMAGE_SPELLINGS, key.PRESTAGE_IMAGE])
def test_image_that_a_user_of_the_guest_names_is_ignored(site: HostedSite, name: str) -> None:
    notes = {name: f"quay.io/other/os@sha256:{'6' * 64}", key.DESIRED_CONFIG: H1}
    site.deliver(H1, {**SERVED, FREE: "1"})
    site.lab.client.patch(NODES, NODE, {"metadata": {"annotations": notes}})
    site.wait_done(H1)
    assert not site.was(key.NodeState.DEGRADED)
    assert key.PRESTAGE_ERROR not in site.notes()
    assert site.machine.boot_count == site.boots


def test_unknown_mode_is_refused(site: HostedSite) -> None:
    site.update(H1, SERVED, mode="sometimes")
    site.wait_degraded("mode: expected refresh or none", "sometimes")


def test_pod_of_the_node_lets_it_read_the_config(open_site: OpenSite) -> None:
    site = open_site(is_allowed=False)
    site.update(H1, {**SERVED, FREE: "1"})
    wait_until(lambda: "cannot read ConfigMap" in site.notes().get(key.REASON, ""), limit_s=30.0)
    volume = {"name": "config", "configMap": {"name": MODE.config_map}}
    spec = {"nodeName": NODE, "containers": [{"name": "a", "image": "a"}], "volumes": [volume]}
    site.lab.client.create(PODS, make_object(PODS, "pod", spec), namespace=NAMESPACE)
    site.wait_done(H1)
    assert not site.was(key.NodeState.DEGRADED)


def test_global_pull_secret_keeps_the_kubelets_login(open_site: OpenSite) -> None:
    """The label may come after an update that wrote the login."""
    site = open_site()
    login = site.text(node_paths.PULL_SECRET) or ""
    site.update(OLD, {**SERVED, node_paths.PULL_SECRET: login})
    site.wait_done(OLD)
    labels = {hosted_key.GLOBAL_PULL_SECRET: "true"}
    site.lab.client.patch(NODES, NODE, {"metadata": {"labels": labels}})
    site.pull_secret.write_text('{"auths": {}}')
    site.update(H1, {**SERVED, node_paths.PULL_SECRET: login, FREE: "1"})
    site.wait_done(H1)
    site.update(H2, {**SERVED, FREE: "2"})
    site.wait_done(H2)
    assert (site.text(node_paths.PULL_SECRET), site.text(FREE)) == ('{"auths": {}}', "2")
    assert not site.was(key.NodeState.DEGRADED)


def test_own_drain_annotations_are_not_those_of_hypershift(open_site: OpenSite) -> None:
    site = open_site(mode=replace(MODE, drain_annotation=hosted_key.HOSTED_DRAIN))
    site.update(H1, {APP: "1"})
    site.wait_note(hosted_key.HOSTED_DRAIN, f"drain-{H1}")
    site.lab.client.patch(NODES, NODE, {"spec": {"unschedulable": True}})
    site.annotate({hosted_key.HOSTED_APPLIED_DRAIN: f"drain-{H1}"})
    site.wait_note(hosted_key.HOSTED_DRAIN, f"uncordon-{H1}")
    assert key.DESIRED_DRAIN not in site.notes()
    site.lab.client.patch(NODES, NODE, {"spec": {"unschedulable": False}})
    site.annotate({hosted_key.HOSTED_APPLIED_DRAIN: f"uncordon-{H1}"})
    site.wait_done(H1)


def test_changed_mode_file_needs_no_restart_of_the_node(site: HostedSite) -> None:
    mode = replace(MODE, drain_annotation=hosted_key.HOSTED_DRAIN)
    site.update(H1, {**SERVED, PATH: json.dumps(mode.to_json())}, mode="refresh")
    site.wait_done(H1)
    assert not site.was_cordoned()
    wait_until(lambda: "settings, Node or kubeconfig changed" in site.messages(), limit_s=30.0)


def test_unknown_field_of_the_mode_file_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / PATH[1:]
    assert read_mode(Root(tmp_path)) is None
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({**MODE.to_json(), "drain": "never"}))
    with pytest.raises(UsageError, match="drain"):
        read_mode(Root(tmp_path))
    place.write_text(json.dumps(MODE.to_json()))
    assert read_mode(Root(tmp_path)) == MODE


RECORDS = 11
"""Writes to the ledger at most in the first update of a machine."""
DEATHS = [
    pytest.param(when, record, marks=() if record % 5 == 1 else pytest.mark.long)
    for record in range(1, RECORDS + 1)
    for when in ("before", "after")
]


@pytest.mark.parametrize(("when", "record"), DEATHS)
def test_killed_agent_reaches_the_target_once(open_site: OpenSite, when: str, record: int) -> None:
    site = open_site(agent=(sys.executable, "-m", "tests.fakes.dying_ledger"))
    (site.directory / NODE / ORDER).write_text(f"{when} {record}")
    site.update(H1, {APP: "1"})
    site.wait_done(H1)
    assert (site.text(APP), site.text(GONE)) == ("1", None)
    assert site.machine.boot_count == site.boots + 1
    assert site.list_values(key.CURRENT_CONFIG) == ["", H1]
    assert not site.was(key.NodeState.DEGRADED)
    # One write is left out when the first check after the boot already passes.
    assert record == RECORDS or not (site.directory / NODE / ORDER).exists()


def test_agent_of_a_pod_ends_when_the_node_is_done(open_site: OpenSite) -> None:
    site = open_site(agent=(*PYTHON_MODULE, "treenail", "run", "--until-done"))
    site.update(H1, {**SERVED, FREE: "1"})
    wait_until(lambda: "nothing is left to do" in site.messages(), limit_s=60.0)
    assert site.notes()[key.CURRENT_CONFIG] == H1
    # The next boot has no agent.
    assert hosted_key.SERVICE_BOOT not in site.notes()
    exits = "treenail.service: Main process exited, code=exited, status=6"
    wait_until(lambda: site.machine.read_journal({"MESSAGE": exits}), limit_s=30.0)
