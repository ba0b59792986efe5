"""The outage of a node does not depend on the size of its image."""

import pytest

from tests.integration.site import SIZE, Options, Site
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

SPEED = SIZE / 0.4
"""Bytes a second: the small image takes 0.4 s, the large one ten times as long."""


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(behaviour=MachineSettings(pull_bytes_per_s=SPEED, staging_s=0.02))


def intervals(site: Site, size_bytes: int) -> tuple[float, float]:
    """Seconds in service since the wish, and out of service, of an update to such an image."""
    site.begin()
    site.reach(site.goal(size_bytes=size_bytes))
    asked, *_ = site.sights()[1:]
    cordoned = [sight for sight in site.sights() if sight.cordoned]
    back = next(sight for sight in site.sights() if sight.at > cordoned[-1].at)
    return cordoned[0].at - asked.at, back.at - cordoned[0].at


def test_ten_times_larger_image_needs_same_outage(site: Site) -> None:
    small = [intervals(site, SIZE) for _ in range(2)]
    before, out = intervals(site, 10 * SIZE)
    assert before > 10 * SIZE / SPEED, "the large image does take longer"
    assert out < 2 * max(away for _, away in small)
