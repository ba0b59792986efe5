"""Selection of the rendered config and the image of new machines."""

import pytest

from tests.provisioning.samples import (
    BASE,
    CLUSTER_IMAGE,
    IMAGE,
    NEW,
    OLD,
    Json,
    make_image_build,
    make_image_config,
    make_pool,
)
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.pools.os_image import NO_BUILD, PoolBuild
from treenail.provisioning.content.source import SelectedImage, select_image, select_rendered


def read(document: Json) -> MachineConfigPool:
    return MachineConfigPool.from_json(document)


def built(image: str = IMAGE) -> PoolBuild:
    return PoolBuild(
        MachineOSConfig.from_json(make_image_config(image)),
        MachineOSBuild.from_json(make_image_build(pull_spec=image)),
    )


def select(pool: Json, build: PoolBuild = NO_BUILD, *needs_cluster: str) -> SelectedImage:
    return select_image(read(pool), build, rendered_image=BASE, needs_cluster=needs_cluster)


def test_new_config_with_an_updated_node_is_selected() -> None:
    assert select_rendered(read(make_pool(updated=1))) == NEW


def test_new_config_without_an_updated_node_is_not_selected() -> None:
    assert select_rendered(read(make_pool(updated=0))) == OLD


def test_counts_of_an_older_spec_do_not_select_the_new_config() -> None:
    pool = make_pool(updated=2)
    pool["metadata"]["generation"] = 4
    assert select_rendered(read(pool)) == OLD


def test_malformed_counts_do_not_select_the_new_config() -> None:
    pool = make_pool()
    pool["status"]["updatedMachineCount"] = "many"
    assert select_rendered(read(pool)) == OLD


def test_pool_without_configs_selects_nothing() -> None:
    assert not select_rendered(read(make_pool(new="", old="", updated=0)))


@pytest.mark.parametrize(
    ("pool", "build", "unreachable", "selected"),
    [
        (make_pool(osImage=IMAGE), NO_BUILD, "", (IMAGE, IMAGE, False)),
        (make_pool(), built(CLUSTER_IMAGE), "registry.internal:5000", ("", BASE, True)),
        (make_pool(), NO_BUILD, "quay.io", ("", "", True)),
        (make_pool(), built(CLUSTER_IMAGE), "quay.io", (CLUSTER_IMAGE, CLUSTER_IMAGE, False)),
    ],
    ids=["of the pool", "built", "rendered", "built in place of a rendered one"],
)
def test_image_of_an_unreachable_registry_is_left_for_later(
    pool: Json, build: PoolBuild, unreachable: str, selected: tuple[str, str, bool]
) -> None:
    found = select(pool, build, *filter(None, [unreachable]))
    assert (found.image, found.os_image_url, found.is_later) == selected


def test_image_of_the_pool_without_an_updated_node_is_not_selected() -> None:
    found = select(make_pool(osImage=IMAGE, updated=0))
    assert (found.image, found.os_image_url) == ("", BASE)
    assert "no node" in found.reason


def test_image_of_a_rebuild_that_no_node_runs_is_not_selected() -> None:
    """The pool counts nodes that have the same config and the image before."""
    asked = []

    def is_image_running(image: str) -> bool:
        asked.append(image)
        return False

    found = select_image(
        read(make_pool(updated=2)),
        built(),
        rendered_image=BASE,
        is_image_running=is_image_running,
    )
    assert (found.image, found.os_image_url, asked) == ("", BASE, [IMAGE])
    assert f"no node of pool worker runs {IMAGE}" in found.reason


def test_tag_in_the_pool_selects_no_image() -> None:
    found = select(make_pool(osImage="quay.io/example/os:latest"))
    assert found.image == ""
    assert "it names a tag" in found.reason


def test_built_image_with_an_open_gate_is_selected() -> None:
    assert select(make_pool(), built()).image == IMAGE


def test_unfinished_build_selects_no_image() -> None:
    waiting = PoolBuild(MachineOSConfig.from_json(make_image_config()), None)
    found = select(make_pool(), waiting)
    assert (found.image, found.os_image_url) == ("", BASE)
