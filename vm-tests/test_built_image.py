"""Image mode with images that the cluster builds, on a real OSTree host."""

from collections.abc import Iterator

import pytest

from treenail_lab.image_builds import find_build_refusal
from vmlab.image.build import Builder
from vmlab.pool import BuiltPool
from vmlab.site import Site

FILE, STATE_FILE = "/etc/treenail-vm.conf", "/var/lib/treenail-vm.conf"
CONTAINERFILE = """\
FROM configs AS final
RUN echo "built from a Containerfile" > /usr/lib/treenail-vm/built \\
 && mkdir -p /etc/treenail-vm.d && echo "of the image" > /etc/treenail-vm.d/built.conf
"""


@pytest.fixture
def built_pool(new_site: Site, builder: Builder) -> Iterator[BuiltPool]:
    """A node at rest out of image mode, in a pool that can build images."""
    found = BuiltPool(new_site, builder.certificate)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize("text", ["", CONTAINERFILE], ids=["config-only", "containerfile"])
@pytest.mark.usefixtures("with_rpm_ostree")
def test_pool_enters_and_leaves_image_mode(
    new_site: Site, built_pool: BuiltPool, text: str
) -> None:
    site, pool = new_site, built_pool
    if text and (why := " ".join(find_build_refusal())).strip():
        pytest.skip(why)
    boots = len(site.story.boots)
    pool.pause()
    pool.add_files("50-files", {FILE: "first", STATE_FILE: "state"})
    pool.request_image(text)
    pool.pause(is_paused=False)
    image = pool.wait_image()
    pool.wait_node(image)
    assert [boot.digest for boot in site.story.boots[boots:]] == [image.partition("@")[2]]
    assert site.machine.sh(f"cat {FILE} /usr{FILE} {STATE_FILE}") == "firstfirststate"
    if text:
        assert site.machine.sh("cat /usr/lib/treenail-vm/built") == "built from a Containerfile\n"
        assert site.machine.sh("cat /etc/treenail-vm.d/built.conf") == "of the image\n"

    jobs = pool.count_jobs()
    pool.add_files("60-files", {FILE: "second", STATE_FILE: "more state"})
    changed = pool.wait_image(but=image)
    pool.wait_node(changed)
    assert pool.count_jobs() <= jobs
    assert site.machine.sh(f"cat {FILE} /usr{FILE} {STATE_FILE}") == "secondsecondmore state"
    if text:
        assert site.machine.sh("cat /usr/lib/treenail-vm/built") == "built from a Containerfile\n"
    assert site.machine.sh("treenail drift").startswith("no drift: ")

    pool.leave_image_mode()
    pool.wait_without_image()
    assert site.machine.sh(f"cat {FILE} {STATE_FILE}") == "secondmore state"
    assert site.machine.sh(f"ls /usr{FILE} 2>/dev/null; true") == ""
    assert site.machine.sh("treenail drift").startswith("no drift: ")
    digests = [each.partition("@")[2] for each in (image, changed, pool.base)]
    assert [boot.digest for boot in site.story.boots[boots:]] == digests
    assert not any("state = Degraded" in event for event in site.story.events)
