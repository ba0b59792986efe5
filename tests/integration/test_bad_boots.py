"""Images and configs that are no good: the node is back on the old pair, without a human.

Each test makes the boot into the new image a bad one, in one of the ways in which boots are bad,
and undoes that for the boot into the old one, as the other deployment would.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import status
from tests.integration.site import LAYERS, LIMIT_S, LOGIN, NODE, SIZE, USER, Goal, Options, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import NODES
from treenail.log import MessageId
from treenail_lab.apiserver.serving.faults import FaultMatch, RefuseFault
from treenail_lab.cluster import build_rendered_config
from treenail_lab.images import make_image
from treenail_lab.machine.ostree.sysroot import SysrootDeployment

pytestmark = pytest.mark.integration

DEADLINE_S = 3.0
CHECKS = "etc/treenail/health.d"
Make = Callable[[bool], None]
"""Makes the boot that comes a bad one, or a good one again."""


@pytest.fixture(scope="module", params=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(
        backend=request.param,
        agent_settings="[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
        f"[health]\ndeadline_s = {DEADLINE_S}\nsettle_s = 0.1\ncheck_s = 0.5\ninterval_s = 0.1\n"
        "failing_s = 0.2\nready_s = 0.2\noutage_s = 0.2\n",
    )


@contextmanager
def bad_with(site: Site, goal: Goal, make: Make) -> Iterator[None]:
    """Within, boots into the goal's image are bad."""

    def at_boot(booted: SysrootDeployment) -> None:
        make(booted.digest == goal.image.digest)

    site.machine.on_boot = at_boot
    try:
        yield
    finally:
        site.machine.on_boot = lambda _: None
        make(False)


def ready(site: Site) -> bool:
    found = site.lab.client.get(NODES, NODE)["status"]
    assert isinstance(found, dict)
    return any(each["type"] == "Ready" and each["status"] == "True" for each in found["conditions"])


def assert_comes_back(site: Site, goal: Goal, *words: str) -> None:
    """Ask for the goal, and find the node on its former pair, ready and with the reason."""
    former = site.current
    site.ask(goal)
    # That takes several starts of the agent, and two boots.
    site.wait_degraded("treenail retry", goal.config, *words, limit_s=3 * LIMIT_S)
    wait_until(lambda: site.calm() and ready(site), limit_s=LIMIT_S)
    reason = site.wait_degraded("treenail retry", goal.config)
    assert site.booted() == former.image.digest
    assert site.notes()[key.CURRENT_CONFIG] == former.config
    ledger = json.loads((site.machine.root / "var/lib/treenail/ledger.json").read_text())
    assert ledger["quarantined"]["target"] == {"config": goal.config, "image": goal.pull_spec}
    sentence = reason.partition("; ")[0]
    assert sentence in " ".join(status(site).stdout.split())
    wait_until(lambda: any(sentence in message for message in site.messages()))
    boots = site.machine.boot_count
    # Requested again, it stays quarantined; another target is reached.
    site.ask(goal)
    site.reach(former)
    assert site.machine.boot_count == boots


def test_masked_kubelet_rolls_back(site: Site) -> None:
    link = site.machine.root / "etc/systemd/system/kubelet.service"

    def mask(bad: bool) -> None:
        link.unlink(missing_ok=True)
        if bad:
            link.symlink_to("/dev/null")

    goal = site.goal()
    with bad_with(site, goal, mask):
        assert_comes_back(site, goal, "Kubelet", "kubelet.service is masked")
    assert site.messages(MESSAGE_ID=MessageId.HEALTH_CHECK_FAILED)
    assert site.messages(MESSAGE_ID=MessageId.ROLLING_BACK)


@pytest.mark.long("bootc")
def test_config_that_masks_kubelet_is_rolled_back_with_its_image(site: Site) -> None:
    link = site.machine.root / "etc/systemd/system/kubelet.service"
    ignition = {"ignition": {"version": "3.5.0"}}
    masking = {**ignition, "systemd": {"units": [{"name": "kubelet.service", "mask": True}]}}
    url = site.goal().pull_spec
    good = site.lab.add_config(
        build_rendered_config(f"rendered-good-{site.backend}", {"config": ignition})
    )
    spec = {"config": masking, "osImageURL": url}
    bad = site.lab.add_config(build_rendered_config(f"rendered-bad-{site.backend}", spec))
    site.annotate({key.DESIRED_CONFIG: good})
    site.wait_note(key.CURRENT_CONFIG, good)
    wait_until(site.calm, limit_s=LIMIT_S)
    boots, image = site.machine.boot_count, site.booted()
    site.annotate({key.DESIRED_CONFIG: bad})
    site.wait_degraded(
        "treenail retry", bad, "Kubelet", "kubelet.service is masked", limit_s=3 * LIMIT_S
    )
    wait_until(lambda: site.calm() and ready(site), limit_s=LIMIT_S)
    assert (site.booted(), site.machine.boot_count) == (image, boots + 2)
    assert site.notes()[key.CURRENT_CONFIG] == good
    assert not link.is_symlink()
    site.reach(site.current)


@pytest.mark.long("bootc")
def test_failed_container_runtime_rolls_back(site: Site) -> None:
    def fail(bad: bool) -> None:
        site.machine.change_settings(failing_units=("crio.service",) if bad else ())

    goal = site.goal()
    with bad_with(site, goal, fail):
        assert_comes_back(site, goal, "ContainerRuntime", "crio.service is failed")


@pytest.mark.long("bootc")
def test_node_without_network_rolls_back(site: Site) -> None:
    faults: list[int] = []

    def cut(bad: bool) -> None:
        if bad:
            faults.append(site.server.inject_fault(RefuseFault(), FaultMatch(user=USER)))
        while faults and not bad:
            site.server.lift_fault(faults.pop())

    goal = site.goal()
    with bad_with(site, goal, cut):
        assert_comes_back(site, goal, "ApiServer")


@pytest.mark.long("bootc")
def test_node_refused_by_api_server_rolls_back(site: Site) -> None:
    kubeconfig = site.machine.root / "var/lib/kubelet/kubeconfig"
    good = kubeconfig.read_text()

    def misdirect(bad: bool) -> None:
        kubeconfig.write_text(good.replace(site.server.url, "https://127.0.0.1:1") if bad else good)

    goal = site.goal()
    with bad_with(site, goal, misdirect):
        assert_comes_back(site, goal, "ApiServer", "refused")


def test_kernel_that_never_boots_is_rolled_back_by_boot_loader(site: Site) -> None:
    dead = make_image(
        "os/node", "dead", SIZE, layers=LAYERS, credential=LOGIN, faults={"boot": "Kernel panic"}
    )
    goal = site.goal(image=dead)
    before = site.machine.failed_boot_count
    assert_comes_back(site, goal, "did not boot")
    assert site.machine.failed_boot_count == before + 3
    assert [each.digest for each in site.machine.deployments].count(dead.digest) == 0


@pytest.mark.long("bootc")
def test_hanging_health_check_rolls_back(site: Site) -> None:
    check = site.machine.root / CHECKS / "hangs"

    def hang(bad: bool) -> None:
        check.unlink(missing_ok=True)
        if bad:
            check.parent.mkdir(parents=True, exist_ok=True)
            check.write_text("#!/bin/sh\nsleep 600\n")
            check.chmod(0o755)

    goal = site.goal()
    with bad_with(site, goal, hang):
        assert_comes_back(site, goal, "health.d/hangs", "did not exit within")


@pytest.mark.long("bootc")
def test_agent_that_crashes_at_start_rolls_back(site: Site) -> None:
    settings = site.machine.root / "etc/treenail/agent.toml"
    good = settings.read_text()

    def break_settings(bad: bool) -> None:
        settings.write_text("this is no TOML" if bad else good)

    goal = site.goal()
    with bad_with(site, goal, break_settings):
        assert_comes_back(site, goal, "Agent", "crashed 5 times in one boot")


def test_agent_stopped_during_the_trial_has_not_crashed(site: Site) -> None:
    skip_second_backend(site)
    check = site.machine.root / CHECKS / "fails"

    def fail(bad: bool) -> None:
        check.unlink(missing_ok=True)
        if bad:
            check.parent.mkdir(parents=True, exist_ok=True)
            check.write_text("#!/bin/sh\nexit 1\n")
            check.chmod(0o755)

    def runs() -> object:
        path = site.machine.root / "var/lib/treenail/crash-record.json"
        return json.loads(path.read_text())["running"]

    goal = site.goal()
    with bad_with(site, goal, fail):
        site.ask(goal)
        site.wait_phase("verifying")
        assert runs() is True
        site.machine.agent.stop()
        assert runs() is False
        fail(False)
        site.machine.agent.start()
        site.reach(goal)


@pytest.fixture
def small_disk(site: Site) -> Iterator[Path]:
    """A disk of its own for the agent's state."""
    state = site.machine.root / "var/lib/treenail"
    site.machine.stop_agent()
    kept = site.directory / "kept"
    shutil.copytree(state, kept)
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "none", state],
        check=False,
        capture_output=True,
    )
    if mounting.returncode:
        site.machine.start_agent()
        pytest.skip("nothing can be mounted here")
    # A reserve that an earlier update left is larger than the disk.
    shutil.copytree(kept, state, dirs_exist_ok=True, ignore=shutil.ignore_patterns("reserve"))
    site.machine.start_agent()
    wait_until(site.calm, limit_s=LIMIT_S)
    try:
        yield state
    finally:
        site.machine.stop_agent()
        shutil.rmtree(kept)
        shutil.copytree(state, kept)
        subprocess.run(["umount", "--lazy", state], check=True)
        shutil.copytree(kept, state, dirs_exist_ok=True)
        site.machine.start_agent()


@pytest.mark.long("bootc")
def test_full_disk_rolls_back(site: Site, small_disk: Path) -> None:
    filler = small_disk / "filler"

    def fill(bad: bool) -> None:
        filler.unlink(missing_ok=True)
        if bad:
            try:
                with filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 4096)
            except OSError:
                return

    goal = site.goal()
    with bad_with(site, goal, fill):
        assert_comes_back(site, goal)
    assert any(
        "cannot save the ledger during the boot trial" in message for message in site.messages()
    )


@pytest.mark.long("bootc")
def test_node_healthy_shortly_before_deadline_stays(site: Site) -> None:
    check = site.machine.root / CHECKS / "slow"
    slow_ns = int(0.8 * DEADLINE_S * 1e9)

    def slow(bad: bool) -> None:
        check.unlink(missing_ok=True)
        if bad:
            check.parent.mkdir(parents=True, exist_ok=True)
            check.write_text(
                f"#!/bin/sh\nbegan=$(stat -c %.9Y $0 | tr -d .)\n"
                f"[ $(( $(date +%s%N) - began )) -gt {slow_ns} ]\n"
            )
            check.chmod(0o755)

    goal = site.goal()
    with bad_with(site, goal, slow):
        boots = site.machine.boot_count
        site.reach(goal)
        assert site.machine.boot_count == boots + 1


def skip_second_backend(site: Site) -> None:
    """Run a test that does not depend on the back end with one of them only."""
    if site.backend != "rpm-ostree":
        pytest.skip("the ledger is the same with each back end")


def change_ledger(site: Site, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the ledger as an agent of another version, which knows no checksum."""
    path = site.machine.root / "var/lib/treenail/ledger.json"
    document = json.loads(path.read_text())
    document.pop("checksum", None)
    change(document)
    path.write_text(json.dumps(document))


def test_new_agent_that_cannot_read_the_ledger_rolls_back(site: Site) -> None:
    skip_second_backend(site)
    path = site.machine.root / "var/lib/treenail/ledger.json"
    kept: list[bytes] = []

    def damage(bad: bool) -> None:
        if bad:
            kept.append(path.read_bytes())
            change_ledger(site, lambda document: document.update(version=2))
        elif kept:
            path.write_bytes(kept.pop())

    goal = site.goal()
    with bad_with(site, goal, damage):
        assert_comes_back(site, goal, "did not boot")
    messages = site.messages(MESSAGE_ID=MessageId.HEALTH_CHECK_FAILED)
    assert any("its version is 2" in message for message in messages)
    assert not (path.parent / "crash-record.json").exists()


def test_new_agent_on_the_ledger_of_an_older_one_finishes_the_update(site: Site) -> None:
    skip_second_backend(site)
    record = site.machine.root / "var/lib/treenail/crash-record.json"

    def forget(document: dict[str, Any]) -> None:
        for name in ("retry", "retained", "prestaged"):
            document.pop(name)
        for name in ("healthMode", "failedBefore", "passedBefore", "pausedSeconds"):
            document["update"]["bootTrial"].pop(name)

    def make_older(bad: bool) -> None:
        if bad:
            change_ledger(site, forget)
            record.unlink()

    goal = site.goal()
    with bad_with(site, goal, make_older):
        site.reach(goal)
    assert not site.was("Degraded")


def test_old_agent_reads_the_ledger_of_a_newer_one_after_the_rollback(site: Site) -> None:
    skip_second_backend(site)
    link = site.machine.root / "etc/systemd/system/kubelet.service"

    def add(document: dict[str, Any]) -> None:
        document["added"] = {"x": 1}
        document["update"]["thaw"] = [1]
        document["update"]["phaseSeconds"]["defrosting"] = 1.0
        document["history"][0]["outcome"] = "postponed"

    def make_newer(bad: bool) -> None:
        link.unlink(missing_ok=True)
        if bad:
            link.symlink_to("/dev/null")
        elif booted_again:
            booted_again.clear()
            change_ledger(site, add)

    booted_again = [True]
    goal = site.goal()
    with bad_with(site, goal, make_newer):
        assert_comes_back(site, goal, "Kubelet")
    assert not booted_again
