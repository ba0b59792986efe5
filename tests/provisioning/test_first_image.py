"""New machines of a pool without an image, in an installation whose workers wait."""

import json
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.provisioning.samples import (
    BASE,
    IMAGE,
    NEW,
    OLD,
    Json,
    make_config,
    make_image_build,
    make_image_config,
    make_pool,
)
from treenail.api import annotations as key
from treenail.clocks import format_rfc3339
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.source import (
    FirstImageSettings,
    ServedInputs,
    SourceSettings,
    SourceUnreadyError,
)


class Installation:
    """A cluster whose workers wait, as files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = FakeClock()
        self.waits = True
        self.needs_cluster: tuple[str, ...] = ()
        self.created = format_rfc3339(self.clock.now())
        self.put(make_config(OLD))
        self.put(make_config(NEW))
        self.put(self.make_config(pull_spec=""))
        self.put_pool()

    def make_config(self, **fields: str) -> Json:
        found = make_image_config(**fields)
        found["metadata"]["creationTimestamp"] = self.created
        return found

    def put_pool(self, *, machines: int = 0, updated: int = 0, name: str = "worker") -> None:
        pool = make_pool(updated=updated, name=name)
        pool["status"]["machineCount"] = machines
        self.put(pool)

    def put(self, document: Json) -> None:
        name = f"{document['kind']}-{document['metadata']['name']}.json"
        (self.directory / name).write_text(json.dumps(document))

    def finish_build(self) -> None:
        self.put(self.make_config())
        self.put(make_image_build())

    def read(self, pool: str = "worker") -> ServedInputs:
        rule = FirstImageSettings(lambda: self.waits, self.clock, 3600.0)
        settings = SourceSettings(needs_cluster=self.needs_cluster, first_images=rule)
        return DirectorySource(self.directory, settings).read_inputs(pool)


@pytest.fixture
def site(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def test_machine_waits_until_the_first_image_exists(site: Installation) -> None:
    with pytest.raises(SourceUnreadyError, match="wait for its first image") as error:
        site.read()
    assert error.value.retry_after_s == 15
    assert "kubectl describe machineosconfig worker" in error.value.remedy
    site.finish_build()
    found = site.read()
    assert (found.image.image, found.image.os_image_url) == (IMAGE, IMAGE)
    assert found.config.name == NEW


def test_further_machines_get_the_first_image_before_a_node_reports_it(site: Installation) -> None:
    site.finish_build()
    site.put_pool(machines=1)
    assert site.read().image.image == IMAGE


def test_machine_gets_the_stock_image_after_the_deadline(site: Installation) -> None:
    site.clock.move(3601.0)
    found = site.read()
    assert (found.image.image, found.image.os_image_url) == ("", BASE)
    assert found.config.name == OLD


def test_first_machine_gets_the_image_also_after_the_deadline(site: Installation) -> None:
    site.finish_build()
    site.clock.move(3601.0)
    assert site.read().image.image == IMAGE


def test_pool_with_machines_of_the_stock_image_follows_the_rollout(site: Installation) -> None:
    site.finish_build()
    site.put_pool(machines=2)
    site.clock.move(3601.0)
    assert site.read().image.image == ""


def test_workers_that_follow_get_the_stock_image(site: Installation) -> None:
    site.waits = False
    assert site.read().image.image == ""
    site.finish_build()
    assert site.read().image.image == ""


def test_pre_built_image_is_served_to_the_first_machines_without_settings(
    site: Installation,
) -> None:
    site.waits = False
    config = site.make_config(pull_spec="")
    config["metadata"]["annotations"] = {key.PRE_BUILT_IMAGE: IMAGE}
    site.put(config)
    with pytest.raises(SourceUnreadyError):
        site.read()
    site.put({**config, "status": {"currentImagePullSpec": IMAGE}})
    site.put(make_image_build())
    assert site.read().image.image == IMAGE


def test_registry_that_machines_cannot_reach_is_not_waited_for(site: Installation) -> None:
    site.needs_cluster = ("quay.io",)
    assert site.read().image.is_later


def test_control_plane_does_not_wait(site: Installation) -> None:
    site.put(site.make_config(pull_spec="", pool="master"))
    site.put_pool(name="master")
    assert site.read("master").image.image == ""
