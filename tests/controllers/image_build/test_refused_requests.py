"""Requests of the build controller that the API server refuses are shown to users."""

import pytest

from tests.controllers.image_build.site import CONTAINERFILE, BuildSite
from tests.waiting import wait_until
from treenail.kube.resources import EVENTS

pytestmark = [pytest.mark.integration]


@pytest.fixture(autouse=True)
def pool(site: BuildSite) -> None:
    site.start_pool(CONTAINERFILE)


@pytest.mark.parametrize(
    ("forbidden", "request_line"),
    [
        ("POST /jobs", "POST jobs builds"),
        ("POST /secrets", "POST secrets builds"),
        ("POST /machineosbuilds", "POST machineosbuilds"),
    ],
)
def test_refused_write_is_reported_until_it_succeeds(
    site: BuildSite, forbidden: str, request_line: str
) -> None:
    refused = (
        "False",
        "RequestRefused",
        (
            f"the API server refuses a request: {request_line}: exceeded quota: small; change the "
            "quota, the admission policy or the role that refuses it"
        ),
    )
    with site.controller(forbidden=forbidden) as wire:
        wait_until(lambda: site.condition("BuildProgressing") == refused)
        assert site.condition("Accepted")[0] == "True"
        assert site.condition("ImageReady")[0] == "False"
        (event,) = site.client.list(EVENTS).items
        assert (event["reason"], event["message"]) == (
            "RequestRefused",
            f"{request_line}: exceeded quota: small",
        )
        written = sum("/machineosconfigs/" in each for each in wire.writes)
        tried = len(wire.writes)
        wait_until(lambda: len(wire.writes) > tried + 2 or "/jobs" not in forbidden)
        assert sum("/machineosconfigs/" in each for each in wire.writes) == written
        wire.forbidden = ""
        wait_until(site.jobs)
        wait_until(lambda: site.condition("BuildProgressing")[:2] == ("True", "Building"))


@pytest.mark.parametrize("path", ["/secrets/push", "/machineconfigs/rendered-worker-0"])
def test_refused_read_is_a_problem_of_the_inputs(site: BuildSite, path: str) -> None:
    with site.controller(forbidden=f"GET {path}"):
        wait_until(lambda: site.condition("Accepted")[:2] == ("False", "RequestRefused"))
    message = site.condition("Accepted")[2]
    assert message.startswith("cannot plan the build: GET ")
    assert message.endswith(
        "exceeded quota: small; apply the output of treenail-controller manifests again, with the "
        "options of the installation"
    )
    wait_until(lambda: site.pool_condition("ImageBuildDegraded")[1] == "RequestRefused")
