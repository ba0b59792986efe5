"""The self-contained tree on bases of Debian: built as in the Containerfile, and run read-only."""

import os
import shutil
from pathlib import Path

import pytest

from tests.controllers.installed import denied
from tests.images.debian_bases import (
    Base,
    build_tree,
    install_tree,
    list_content,
    make_service_command,
    run_in,
)
from tests.images.locks import read_locked_versions
from tests.waiting import wait_until
from treenail import __version__
from treenail.api import annotations as key
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.images import Image, make_image
from treenail_lab.lifetime.owner import owner

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.limit(5400),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="needs root, debootstrap"
    ),
]

_OWN_PACKAGES = (
    "python3", "python3-gi", "python3-pydbus", "python3-psutil", "python3-tenacity", "python3-yaml",
    "python3-markdown-it",
)  # fmt: skip
BASES = {
    "packages": Base("bookworm", _OWN_PACKAGES, "python3", ("--packages", "distribution")),
    "python": Base("bookworm", ("python3", "gir1.2-glib-2.0"), "python3"),
    "none": Base("bookworm", (), "python3"),
    # girepository-2.0, and the PyGObject that uses it.
    "girepository": Base("trixie", ("python3", "gir1.2-glib-2.0"), "python3"),
    # Beside the base's own interpreter, as Python 3.12 on CentOS Stream 9.
    "second": Base("forky", ("python3",), "python3.13"),
}
HAVE_PYTHON = {"packages", "python", "girepository"}
NEW_PYGOBJECT = {"girepository", "second"}
LIMIT_S = 600.0
SIZE = 2_000_000
ARBITRARY_UID = 1_000_650_000
"""As OpenShift assigns to a container."""
CONFIG = """
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata: {name: 99-motd}
spec:
  config:
    ignition: {version: 3.4.0}
    storage:
      files:
      - {path: /etc/motd, mode: 0644, contents: {source: "data:,hello"}}
"""


@pytest.mark.parametrize("case", BASES)
def test_node_tree_runs_on_base(case: str, tmp_path: Path) -> None:
    base, tree, root = BASES[case], tmp_path / "tree", tmp_path / "root"
    build_tree(base, "node", tree)
    has_copied_python = (tree / "usr/lib/treenail/bin").exists()
    assert has_copied_python == (case not in HAVE_PYTHON)
    if case != "packages":
        (pygobject,) = (tree / "usr/lib/treenail/packages").glob("pygobject-*.dist-info")
        lock = "node-girepository-2.0" if case in NEW_PYGOBJECT else "node"
        assert pygobject.name == f"pygobject-{read_locked_versions(lock)['pygobject']}.dist-info"
    # As on an OSTree system.
    install_tree(base, tree, root)
    shutil.rmtree(root / "usr/local")
    (root / "usr/local").symlink_to("../var/usrlocal")
    assert "imported " in run_in(root, "/usr/lib/treenail/check-treenail")
    assert run_in(root, "treenail --version") == f"treenail {__version__}\n"
    assert "Node         unknown" in run_in(root, "treenail status || true")
    (root / "config.yaml").write_text(CONFIG)
    applied = run_in(root, APPLY_ONCE)
    assert applied.endswith("hello\n"), applied


APPLY_ONCE = """
mkdir -p /tmp/root/etc
treenail once --no-services --root /tmp/root /config.yaml
cat /tmp/root/etc/motd; echo
"""


def test_node_tree_is_reproducible(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for target in (first, second):
        build_tree(BASES["none"], "node", target)
    assert list_content(first) == list_content(second)


@pytest.fixture(scope="module")
def controller_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controller")
    build_tree(BASES["none"], "controller", folder / "tree")
    install_tree(BASES["none"], folder / "tree", folder / "root")
    shutil.rmtree(folder / "root/usr/share/zoneinfo", ignore_errors=True)
    return folder / "root"


def test_controller_tree_runs_as_arbitrary_user(controller_root: Path) -> None:
    check = "/usr/lib/treenail/check-treenail-controller"
    assert "imported " in run_in(controller_root, check, ARBITRARY_UID)
    shown = run_in(controller_root, "treenail-controller --help", ARBITRARY_UID)
    assert "usage: treenail-controller" in shown


def test_controller_tree_contains_time_zones(controller_root: Path) -> None:
    start = (controller_root / "usr/bin/treenail-controller").read_text().split("from ")[0]
    script = controller_root / "show-zone"
    script.write_text(f"{start}import zoneinfo\nprint(zoneinfo.ZoneInfo('Asia/Tokyo'))\n")
    script.chmod(0o755)
    assert run_in(controller_root, "/show-zone", ARBITRARY_UID) == "Asia/Tokyo\n"


def test_controller_tree_updates_pool_of_lab(controller_root: Path) -> None:
    before, image = make_image("os", "1", SIZE), make_image("os", "2", SIZE)
    with owner.temporary_directory() as folder:
        lab = Lab(folder, LabPlan(("n1",), (before,)))
        command = make_service_command(controller_root, ARBITRARY_UID)
        controllers = ControllerReplicas(lab, command=command)

        def is_updated_to(image: Image) -> bool:
            notes = lab.read_annotations("n1")
            current = notes.get(key.CURRENT_OS_IMAGE) == image.pull_spec
            return current and notes.get(key.STATE) == "Done"

        try:
            lab.start()
            controllers.create_manifests()
            controllers.start_replica()
            lab.add_config(pool.build_config("00-worker"))
            pool.apply_policy(lab, {"maxFailures": 0})
            for each in (before, image):
                lab.add_image(each)
                pool.apply_pool(lab, pool.build_pool(each.pull_spec))
                wait_until(lambda each=each: is_updated_to(each), limit_s=LIMIT_S)  # type: ignore[misc]
            assert denied(lab.server) == frozenset()
        finally:
            controllers.stop()
            lab.stop()
