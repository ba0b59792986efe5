"""Pull secrets that are wrong, broken or in more than one place, and images that are not there."""

import base64
import json
from dataclasses import replace

import pytest

from tests.integration.site import LAYERS, LOGIN, SIZE, Site
from tests.waiting import wait_until
from treenail.log import MessageId
from treenail_lab.cluster import build_pull_secret
from treenail_lab.images import Credential, make_image

pytestmark = pytest.mark.integration

INTERNAL = "image-registry.openshift-image-registry.svc:5000"
PRIVATE = "private.example"
WRONG = "canary-that-is-wrong"


def untouched(site: Site) -> bool:
    return (
        not site.was_cordoned()
        and site.machine.staged_deployment is None
        and site.machine.boot_count == site.boots
    )


def test_refused_credential_is_reported_and_previous_one_is_used(site: Site) -> None:
    site.reach(site.goal())
    goal, starts = site.goal(), site.machine.agent.start_count
    path, right = site.pull_secret, site.pull_secret.read_text()
    path.write_text(
        build_pull_secret([replace(goal.image, credential=Credential("puller", WRONG))])
    )
    site.reach(goal)
    assert site.machine.agent.start_count == starts + 1, "by the boot"
    refused = (
        f"registry {goal.image.registry} rejected the newest credential; "
        "the previous one stays in use"
    )
    wait_until(lambda: ("Warning", "PullSecretUnusable", refused) in site.events())
    path.write_text(right)
    site.reach(site.goal())
    assert WRONG not in json.dumps(site.machine.read_journal()) + repr(site.events())


def test_two_refused_credentials_are_reported_and_right_one_recovers(
    site: Site,
) -> None:
    path, right = site.pull_secret, site.pull_secret.read_text()
    login = Credential("puller", "renewed")
    image = make_image(
        "os/node", "renewed", SIZE, registry=PRIVATE, layers=LAYERS, credential=login
    )
    goal, starts = site.goal(image=image), site.machine.agent.start_count
    for password in ("old", WRONG):
        wrong = replace(image, credential=Credential("puller", password))
        path.write_text(build_pull_secret([site.current.image, wrong]))
        site.ask(goal)
        reason = site.wait_degraded("unauthorized")
    assert "add credentials" in reason
    assert untouched(site)
    wait_until(lambda: site.conditions().get("NodeDegraded") == "True")
    path.write_text(build_pull_secret([site.current.image, image]))
    site.settle(goal)
    assert site.machine.agent.start_count == starts + 1, "by the boot"
    assert WRONG not in json.dumps(site.machine.read_journal()) + repr(site.events()) + reason
    path.write_text(right)
    site.reach(site.goal())


def test_missing_credential_degrades_node(site: Site) -> None:
    goal = site.goal()
    path, right = site.pull_secret, site.pull_secret.read_text()
    path.write_text('{"auths": {}}')
    site.ask(goal)
    site.wait_degraded("authentication required", "pull secret")
    assert untouched(site)
    path.write_text(right)
    site.settle(goal)


def test_missing_image_is_reported_and_another_target_recovers(site: Site) -> None:
    site.ask(site.goal(published=False))
    site.wait_degraded("manifest unknown", "push it again")
    assert untouched(site)
    site.reach(site.goal())


def test_missing_image_recovers_once_published(site: Site) -> None:
    goal = site.goal(published=False)
    site.ask(goal)
    site.wait_degraded("manifest unknown")
    assert untouched(site)
    site.lab.add_image(goal.image)
    site.settle(goal)


@pytest.mark.long("dockercfg")
@pytest.mark.parametrize("form", ["dockerconfigjson", "dockercfg"])
def test_secret_of_the_internal_registry_is_merged(site: Site, form: str) -> None:
    login = Credential("node", f"internal-{form}")
    image = make_image(
        "os/node", f"internal-{form}", SIZE, registry=INTERNAL, layers=LAYERS, credential=login
    )
    path = site.machine.root / "etc/mco/internal-registry-pull-secret.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(build_pull_secret([image]))
    path.write_text(json.dumps(document if form == "dockerconfigjson" else document["auths"]))
    site.reach(site.goal(image=image))
    site.reach(site.goal())
    merged = json.loads((site.machine.root / "var/lib/treenail/auth.json").read_text())
    assert merged["auths"] == {
        INTERNAL: {"auth": encoded(login)},
        site.current.image.registry: {"auth": encoded(LOGIN)},
    }
    path.unlink()


def encoded(login: Credential) -> str:
    return base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def test_invalid_pull_secret_keeps_last_valid_one_and_is_reported(site: Site) -> None:
    path, right = site.pull_secret, site.pull_secret.read_text()
    path.write_text(right[: len(right) // 2])
    site.reach(site.goal())
    events = [event for event in site.events() if "/var/lib/kubelet/config.json" in event[2]]
    (text,) = {message for _, _, message in events}
    assert events[0][:2] == ("Warning", "PullSecretUnusable")
    assert "stay in use" in text
    assert text in site.messages(MESSAGE_ID=MessageId.CREDENTIALS_INVALID)
    path.write_text(right)
    site.reach(site.goal())
