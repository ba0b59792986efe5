"""Images of PinnedImageSets: pulled beside updates, pinned, reported, and unpinned."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.site import LIMIT_S, LOGIN, NODE, PASSWORD, SIZE, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.host.cri.images import CRIO_PINS
from treenail.kube.resources import MACHINECONFIGNODES, NODES, PINNEDIMAGESETS
from treenail_lab.images import Image, make_image
from treenail_lab.machine.node.daemons import build_environment

pytestmark = pytest.mark.integration

Json = dict[str, Any]
UNIT = "treenail-pinned-images"
HUGE = 10**18


def make_app(site: Site, name: str, size: int = 1000, *, published: bool = True) -> Image:
    image = make_image(f"app/{name}", "1", size, credential=LOGIN)
    if published:
        site.lab.add_image(image)
    return image


class Pins:
    """The PinnedImageSets of the node, and what its runtime has."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._sets: dict[str, int] = {}

    def write(self, name: str, *images: Image) -> int:
        """Create or replace a set, and name it on the Node as the controller does."""
        spec = {"pinnedImages": [{"name": image.pull_spec} for image in images]}
        client = self.site.lab.client
        if name in self._sets:
            written: Json = client.patch(PINNEDIMAGESETS, name, {"spec": spec})
        else:
            body = {
                "apiVersion": PINNEDIMAGESETS.api_version,
                "kind": PINNEDIMAGESETS.kind,
                "metadata": {"name": name},
            }
            written = client.create(PINNEDIMAGESETS, {**body, "spec": spec})
        self._sets[name] = int(written["metadata"]["generation"])
        self._annotate()
        return self._sets[name]

    def delete(self, *names: str) -> None:
        for name in names:
            self.site.lab.client.delete(PINNEDIMAGESETS, name)
            del self._sets[name]
        self._annotate()

    def clear(self) -> None:
        self.delete(*self._sets)
        wait_until(lambda: self.read_pinned() == set(), limit_s=LIMIT_S)
        self.run_crictl("rmi", "--prune")

    def _annotate(self) -> None:
        value = ",".join(f"{name}@{self._sets[name]}" for name in sorted(self._sets))
        metadata = {"annotations": {key.PINNED_IMAGE_SETS: value or None}}
        self.site.lab.client.patch(NODES, NODE, {"metadata": metadata})

    def run_crictl(self, *words: str) -> str:
        endpoint = f"unix://{self.site.machine.root}/run/crio/crio.sock"
        environment = build_environment(self.site.machine.root.parent)
        argv = ["crictl", "--runtime-endpoint", endpoint, "--image-endpoint", endpoint, *words]
        return subprocess.run(
            argv, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
        ).stdout

    def _read_images(self) -> list[Json]:
        return list(json.loads(self.run_crictl("images", "--output=json"))["images"])

    def read_images(self) -> set[str]:
        return {name for image in self._read_images() for name in image["repoDigests"]}

    def read_pinned(self) -> set[str]:
        listed = [image["repoDigests"] for image in self._read_images() if image["pinned"]]
        return {name for names in listed for name in names}

    def read_status(self) -> dict[str, Json]:
        """Return the sets in the status of the MachineConfigNode by name."""
        status: Json = self.site.lab.client.get(MACHINECONFIGNODES, NODE)["status"]  # type: ignore[assignment]
        return {entry.pop("name"): entry for entry in status.get("pinnedImageSets", [])}

    def read_condition(self, kind: str) -> Json:
        status: Json = self.site.lab.client.get(MACHINECONFIGNODES, NODE)["status"]  # type: ignore[assignment]
        return next((one for one in status["conditions"] if one["type"] == kind), {"status": ""})

    def wait_complete(self, **sets: int) -> None:
        complete = {
            name: {"currentGeneration": number, "desiredGeneration": number}
            for name, number in sets.items()
        }
        wait_until(lambda: self.read_status() == complete, limit_s=LIMIT_S)
        assert self.read_condition("PinnedImageSetsDegraded")["status"] == "False"
        assert self.read_condition("PinnedImageSetsProgressing")["status"] == "False"

    def wait_degraded(self, *words: str) -> None:
        def is_shown() -> bool:
            condition = self.read_condition("PinnedImageSetsDegraded")
            return condition["status"] == "True" and all(w in condition["message"] for w in words)

        wait_until(is_shown, limit_s=LIMIT_S)

    def find_process(self) -> int:
        """Return the process that pulls; 0 without one."""
        mark = str(self.site.machine.root.parent).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                is_ours = b"--pinned-images" in command and mark in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_ours:
                return int(entry.name)
        return 0


@pytest.fixture
def pins(site: Site) -> Iterator[Pins]:
    pins = Pins(site)
    yield pins
    pins.clear()


def test_pinned_images_are_there_until_their_last_set_goes(site: Site, pins: Pins) -> None:
    a, b, c = (make_app(site, name) for name in "abc")
    specs = {image.pull_spec for image in (a, b)}
    pins.wait_complete(one=pins.write("one", a, b))
    assert pins.read_pinned() == specs
    pins.run_crictl("rmi", "--prune")
    assert pins.read_images() == specs
    two = pins.write("two", b, c)
    pins.wait_complete(one=1, two=two)
    pins.delete("one")
    pins.wait_complete(two=two)
    # What the other set still needs stays.
    assert pins.read_pinned() == {b.pull_spec, c.pull_spec}
    pins.run_crictl("rmi", "--prune")
    assert pins.read_images() == {b.pull_spec, c.pull_spec}
    pins.delete("two")
    wait_until(lambda: pins.read_status() == {}, limit_s=LIMIT_S)
    assert not (site.machine.root / CRIO_PINS.lstrip("/")).exists()
    pins.run_crictl("rmi", "--prune")
    assert pins.read_images() == set()
    reloads = [entry for entry in site.machine.read_journal({"UNIT": "crio.service"})
               if entry.get("JOB_TYPE") == "reload"]  # fmt: skip
    assert len(reloads) >= 4
    site.assert_unchanged()


def test_update_does_not_wait_for_pulls(site: Site, pins: Pins) -> None:
    slow = make_app(site, "slow", 50 * SIZE)
    # The pull would take an hour: it cannot end before the update, however busy the host is.
    with site.slow_pull(SIZE / 72):
        pins.write("slow", slow)
        pid = wait_until(pins.find_process, limit_s=LIMIT_S)
        site.reach(site.goal(image=site.current.image))
        assert (pins.find_process(), pins.read_images()) == (pid, set())
        # Deleted while it pulls.
        pins.delete("slow")
        wait_until(lambda: pins.find_process() != pid, limit_s=LIMIT_S)
    assert pins.read_images() == set()


def test_set_with_a_problem_is_reported_and_changes_nothing(site: Site, pins: Pins) -> None:
    good, absent = make_app(site, "good"), make_app(site, "absent", published=False)
    huge = make_app(site, "huge", HUGE)
    pins.wait_complete(one=pins.write("one", good))
    for images, words in (
        ((good, absent), "spec.pinnedImages[1].name: expected an image that can be pulled, found"),
        ((good, huge), "spec.pinnedImages: expected at most"),
    ):
        generation = pins.write("one", *images)
        pins.wait_degraded("PinnedImageSet one: ", words)
        wait_until(lambda: "lastFailedGeneration" in pins.read_status()["one"], limit_s=LIMIT_S)
        status = pins.read_status()["one"]
        assert (status["desiredGeneration"], status["lastFailedGeneration"]) == (generation,) * 2
        assert words in status["lastFailedGenerationError"]
        assert pins.read_pinned() == pins.read_images() == {good.pull_spec}
    # A name that the CRD accepts and no runtime does is the problem of its set alone.
    upper = replace(good, repository="app/UPPER")
    pins.write("two", upper)
    pins.wait_degraded("PinnedImageSet two: spec.pinnedImages[0].name is ")
    pins.write("one", good)
    wait_until(lambda: pins.read_status()["one"].get("currentGeneration") == 4, limit_s=LIMIT_S)
    pins.delete("two")
    generation = pins.write("one", good, absent)
    pins.wait_degraded("ImageNotFound")
    # systemd repeats the unit.
    site.lab.add_image(absent)
    pins.wait_complete(one=generation)
    site.assert_unchanged()
    assert site.notes()[key.STATE] == "Done"


def test_killed_process_begins_again_and_shows_no_login(site: Site, pins: Pins) -> None:
    images = [make_app(site, f"killed-{number}", SIZE) for number in range(4)]
    killed = set[int]()
    commands = set[bytes]()

    def interfere() -> bool:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                commands.add(entry.read_bytes())
        pid, present = pins.find_process(), len(pins.read_images())
        if pid and pid not in killed and len(killed) < present < len(images):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return present == len(images)

    with site.slow_pull(SIZE / 2):
        generation = pins.write("killed", *images)
        wait_until(interfere, limit_s=LIMIT_S)
    pins.wait_complete(killed=generation)
    assert pins.read_pinned() == {image.pull_spec for image in images}
    assert killed
    pulls = {command for command in commands if b"crictl" in command and b"pull" in command}
    assert pulls
    assert all(PASSWORD.encode() not in command and b"auth" not in command for command in pulls)
    assert PASSWORD not in "".join(str(entry) for entry in site.machine.read_journal())
