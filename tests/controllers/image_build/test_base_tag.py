"""A base by tag: the build controller on the lab's API server and a real registry."""

import json

import pytest

from tests.controllers.image_build.site import (
    BuildSite,
    Json,
    MovableClock,
)
from tests.waiting import wait_until
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.kube.resources import CONTROLLERCONFIGS, MACHINEOSCONFIGS

pytestmark = [pytest.mark.integration]

ALWAYS = json.dumps(
    [
        {
            "days": ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"],
            "start": "00:00",
            "duration": "24h",
            "timeZone": "UTC",
        }
    ]
)


@pytest.fixture(autouse=True)
def pool(site: BuildSite) -> None:
    site.add_pool()


def add_tagged(site: BuildSite, tag: str, **notes: str) -> str:
    base = f"{site.registry.host}/os/base:{tag}"
    notes_by_name = {f"treenail.io/{each.replace('_', '-')}": text for each, text in notes.items()}
    site.add_image_config(annotations={"treenail.io/base-image": base, **notes_by_name})
    return base


def record(site: BuildSite) -> dict[str, str]:
    notes = site.image_config()["metadata"]["annotations"]
    return json.loads(notes.get("treenail.io/resolved-base", "{}"))


def test_tag_is_resolved_once_until_a_rebuild_is_requested(site: BuildSite) -> None:
    first = site.move_tag("once", "1")
    tag = add_tagged(site, "once")
    with site.controller():
        image = site.wait_image()
    assert site.read_labels(image)["baseOSContainerImage"] == first
    assert (record(site)["tag"], record(site)["image"]) == (tag, first)
    assert site.condition("BaseImageResolved")[:2] == ("True", "Resolved")
    (build,) = site.builds()
    second = site.move_tag("once", "2")
    with site.controller() as wire:
        # Another pool shows that the controller has observed everything.
        site.add_pool("other")
        site.add_image_config("other")
        site.wait_image("other")
        assert site.image() == image
        assert not any("machineosconfigs/worker" in each for each in wire.writes)
        site.request_rebuild("worker")
        later = site.wait_image(but=image)
        wait_until(lambda: "forRebuild" not in record(site))
    assert site.read_labels(later)["baseOSContainerImage"] == second
    names = {each["metadata"]["name"] for each in site.builds()} - {build["metadata"]["name"]}
    assert len([each for each in names if each.startswith("worker-")]) == 1


def test_new_digest_of_a_tag_is_built_within_the_window(site: BuildSite) -> None:
    first = site.move_tag("watched", "1")
    tag = add_tagged(site, "watched", rebuild_schedule=ALWAYS)
    with site.controller():
        image = site.wait_image()
    second = site.move_tag("watched", "2")
    # A controller that starts asks once, then every quarter of an hour.
    metrics = ControllerMetrics()
    with site.controller(metrics=metrics):
        later = site.wait_image(but=image)
        wait_until(lambda: site.find_events("ImageTagMoved"))
    assert site.read_labels(later)["baseOSContainerImage"] == second
    (moved,) = site.find_events("ImageTagMoved")
    assert moved["message"] == f"{tag} moved from {first} to {second}"
    name = "treenail_controller_base_image_tag_changes_total"
    line = f'{name}{{pool="worker",reason="ImageTagMoved"}} 1.0'
    assert line in metrics.render_text().splitlines()
    site.move_tag("watched", "1")
    with site.controller():
        wait_until(lambda: site.condition("BaseImageResolved")[1] == "TagMovedBack", limit_s=20)
        wait_until(lambda: site.find_events("TagMovedBack"))
        assert site.image() == later
        assert site.condition("ImageReady")[0] == "True"


def test_changed_login_resolves_the_tag_at_once(site: BuildSite) -> None:
    site.move_tag("private", "1")
    site.put_secret("global-pull-secret-copy", host="other.example.com")
    add_tagged(site, "private")
    clock = MovableClock()
    with site.controller(clock=clock):
        wait_until(lambda: site.condition("BaseImageResolved")[0] == "False", limit_s=20)
        assert site.condition("BaseImageResolved")[1] == "BaseLoginRefused"
        site.put_secret("global-pull-secret-copy")
        # Less than the minute until the registry is asked again.
        clock.move(31)
        note: Json = {"metadata": {"annotations": {"example.com/now": "later"}}}
        site.client.patch(MACHINEOSCONFIGS, "worker", note)
        site.wait_image()


@pytest.mark.long
@pytest.mark.parametrize("is_before", [True, False])
def test_kill_at_each_write_leads_to_one_build_of_one_base(
    site: BuildSite, is_before: bool
) -> None:
    bases: list[str] = []
    for number in range(8):
        bases.append(site.move_tag("killed", f"{number}"))
        tag = f"{site.registry.host}/os/base:killed"
        name = f"pool-{number}"
        site.add_pool(name)
        site.add_image_config(name, annotations={"treenail.io/base-image": tag})

        with site.controller(die_at=number, dies_before=is_before) as wire:
            wait_until(lambda wire=wire, name=name: wire.is_dead or site.image(name), limit_s=20)  # type: ignore[misc]
        if site.image_config(name)["metadata"]["annotations"].get("treenail.io/resolved-base"):
            # The record keeps the base of this build, whatever the tag stands for now.
            site.move_tag("killed", f"later-{number}")
        with site.controller():
            image = site.wait_image(name)
        assert site.read_labels(image)["baseOSContainerImage"] == bases[-1], number
        own = [each for each in site.builds() if each["spec"]["machineOSConfig"]["name"] == name]
        assert len(own) == 1, number


def test_unreadable_controllerconfig_is_a_problem_of_the_tag(site: BuildSite) -> None:
    site.move_tag("unread", "1")
    add_tagged(site, "unread")
    bundle = {"spec": {"additionalTrustBundle": "abc"}}
    site.client.patch(CONTROLLERCONFIGS, "machine-config-controller", bundle)
    with site.controller():
        wait_until(lambda: site.condition("Accepted")[0] == "False")
    status, reason, message = site.condition("Accepted")
    assert (status, reason) == ("False", "ConfigInvalid")
    assert "spec.additionalTrustBundle: expected base64" in message
