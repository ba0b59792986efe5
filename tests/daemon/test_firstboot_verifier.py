"""The first boot of a machine that a config server provisioned, until its Node may report."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_firstboot import Host, assert_joined
from tests.fakes.disk import Entry
from tests.fakes.world import Killed
from tests.update.build import A, B
from treenail.api import annotations as key
from treenail.config import node_paths
from treenail.daemon.firstboot import DONE_FILE, ENCAPSULATED_BACKUP, ENCAPSULATED_CONFIG
from treenail.errors import ConfigError
from treenail.host.filesystem.disk import Disk, StrPath

NAME = "rendered-worker-1"
TOKEN = "tn_abc_canary"
FILES = {"/etc/motd": "welcome", "/var/lib/worker": "data"}


class DyingDisk(Disk):
    """Kills the process before one of its changes, by number."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.changes = 0
        self._dies_at = dies_at

    def write(self, descriptor: int, content: bytes) -> int:
        self._count()
        return super().write(descriptor, content)

    def replace(self, path: StrPath, target: StrPath) -> None:
        self._count()
        super().replace(path, target)

    def unlink(self, path: StrPath) -> None:
        self._count()
        super().unlink(path)

    def mkdir(self, path: StrPath) -> None:
        self._count()
        super().mkdir(path)

    def _count(self) -> None:
        self.changes += 1
        if self.changes == self._dies_at:
            raise Killed


class Provisioned(Host):
    """A machine whose root directory Ignition has written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for path in ("etc/machine-config-daemon", "boot/ignition", "run", "var/lib"):
            (root / path).mkdir(parents=True)
        for path in node_paths.IGNITION_FILES:
            self.write(path, TOKEN)
        self.claim()
        self.encapsulate(osImageURL=B.image)
        self.serve()
        for path, text in FILES.items():
            self.write(path, text)

    def claim(self, config: str = NAME, image: str = "", **more: str) -> None:
        images = {key.CURRENT_IMAGE: image, key.DESIRED_IMAGE: image} if image else {}
        found = {key.CURRENT_CONFIG: config, key.DESIRED_CONFIG: config, key.STATE: "Done"}
        self.write(node_paths.FIRST_BOOT_ANNOTATIONS, json.dumps({**found, **images, **more}))

    def encapsulate(self, **spec: object) -> None:
        document = {"kind": "MachineConfig", "metadata": {"name": NAME}, "spec": spec}
        self.write(ENCAPSULATED_CONFIG, json.dumps(document))

    def serve(self, name: str = NAME, files: dict[str, str] | None = None) -> None:
        entries = [
            {"path": path, "mode": 0o644, "contents": {"source": f"data:,{text}"}}
            for path, text in (FILES if files is None else files).items()
        ]
        ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}}
        document = {
            "kind": "MachineConfig",
            "metadata": {"name": name},
            "spec": {"config": ignition, "osImageURL": A.image},
        }
        self.write(node_paths.SERVED_CONFIG, json.dumps(document))

    def bake(self, image: Any, **files: str) -> None:
        """Give an image these files in /etc."""
        entries = {name: Entry("file", 0o644, text.encode()) for name, text in files.items()}
        self.world.vendor[image.digest] = entries

    def write(self, path: str, text: str) -> None:
        place = self.root / path[1:]
        place.write_text(text)
        place.chmod(0o644)

    def read(self, path: str) -> str | None:
        place = self.root / path[1:]
        return place.read_text() if place.exists() else None


@pytest.fixture
def host(tmp_path: Path) -> Provisioned:
    return Provisioned(tmp_path)


def assert_untouched(host: Provisioned) -> None:
    """It may not join, and has all that a next attempt needs."""
    assert not (host.root / DONE_FILE[1:]).exists()
    assert host.read(ENCAPSULATED_CONFIG) is not None
    assert [host.read(path) for path in node_paths.IGNITION_FILES] == [TOKEN, TOKEN]


def test_verified_machine_keeps_no_file_with_the_token(host: Provisioned) -> None:
    host.join()
    assert (host.world.booted, host.world.boots) == (B.digest, 2)
    assert_joined(host)
    assert [host.read(path) for path in node_paths.IGNITION_FILES] == [None, None]
    kept = [each for each in host.root.rglob("*") if each.is_file()]
    assert [each for each in kept if TOKEN in each.read_text()] == []


def test_files_with_the_token_stay_until_the_target_is_booted(host: Provisioned) -> None:
    assert not host.boot()
    assert host.world.boots == 2
    assert_untouched(host)


def test_served_files_belong_to_the_config(host: Provisioned) -> None:
    host.join()
    owned = json.loads((host.root / "var/lib/treenail/managed.json").read_text())
    assert set(FILES) <= set(json.dumps(owned).split('"'))


def test_file_that_differs_is_written_before_the_machine_joins(
    host: Provisioned, caplog: pytest.LogCaptureFixture
) -> None:
    host.write("/etc/motd", "of another program")
    (host.root / "var/lib/worker").unlink()
    host.join()
    assert {path: host.read(path) for path in FILES} == FILES
    assert "/etc/motd: contents differ" in caplog.text


def test_own_kubeconfig_of_the_machine_stays(host: Provisioned) -> None:
    (host.root / "etc/kubernetes").mkdir()
    host.serve(files={node_paths.KUBECONFIG: "of-the-config"})
    host.write(node_paths.KUBECONFIG, "of the token")
    host.join()
    assert host.read(node_paths.KUBECONFIG) == "of the token"


def test_annotations_of_another_config_block_the_machine(host: Provisioned) -> None:
    host.claim("rendered-worker-2")
    with pytest.raises(ConfigError, match=f"{NAME}, and .*rendered-worker-2"):
        host.first_boot().reconcile_once()
    assert not host.boot()
    assert_untouched(host)


def test_served_config_of_another_name_blocks_the_machine(host: Provisioned) -> None:
    host.serve("rendered-worker-2")
    assert not any(host.boot() for _ in range(3))
    assert host.world.boots == 1
    assert_untouched(host)
    assert "rendered-worker-2" in str(host.statuses_shown()[-1]["failure"])


def test_annotations_of_another_image_block_the_machine(host: Provisioned) -> None:
    host.claim(image=A.image)
    with pytest.raises(ConfigError, match="names the image"):
        host.first_boot().reconcile_once()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_unreadable_annotations_block_the_machine(host: Provisioned, text: str) -> None:
    host.write(node_paths.FIRST_BOOT_ANNOTATIONS, text)
    with pytest.raises(ConfigError, match="node-annotations"):
        host.first_boot().reconcile_once()


def test_image_of_the_annotations_is_booted_without_an_encapsulated_config(
    host: Provisioned,
) -> None:
    (host.root / ENCAPSULATED_CONFIG[1:]).unlink()
    host.claim(image=B.image)
    host.bake(B, motd="welcome")
    host.join()
    assert host.world.booted == B.digest


def test_image_with_the_files_of_the_config_joins_with_one_reboot(host: Provisioned) -> None:
    host.claim(image=B.image)
    host.bake(B, motd="welcome")
    host.join()
    assert (host.world.booted, host.world.boots) == (B.digest, 2)
    assert_joined(host)


def test_image_without_a_file_of_the_config_is_refused_before_the_reboot(
    host: Provisioned,
) -> None:
    host.claim(image=B.image)
    host.bake(B)
    assert not host.boot()
    assert host.world.boots == 1
    assert_untouched(host)
    failure = host.statuses_shown()[-1]["failure"]
    assert "/etc/motd is missing" in failure["message"]
    assert "/var/lib/worker" not in failure["message"], "no image carries it"
    activities = [each["activity"] for each in host.statuses_shown()]
    retries = activities[activities.index("retrying after a failure") :]
    assert f"staging {B.image}" not in retries, "the image is pulled once"


@pytest.mark.parametrize("is_setting", [True, False])
def test_image_may_lack_files_where_the_agent_writes_them(
    host: Provisioned, is_setting: bool
) -> None:
    host.has_files_in_image = not is_setting
    host.claim(image=B.image, **({} if is_setting else {key.IMAGE_FILES: "write"}))
    host.bake(B)
    (host.root / "etc/motd").unlink()
    host.join()
    assert host.world.booted == B.digest
    assert host.read("/etc/motd") == "welcome"


def test_image_without_a_file_of_the_config_is_refused_after_the_reboot(
    host: Provisioned,
) -> None:
    """Such as a machine that was installed from this image."""
    host.claim(image=A.image)
    host.encapsulate(osImageURL=A.image)
    host.bake(A, motd="of another build")
    assert not host.boot()
    assert host.world.boots == 1
    assert_untouched(host)
    assert "/etc/motd has other contents" in host.statuses_shown()[-1]["failure"]["message"]


def test_file_that_no_image_carries_is_written(host: Provisioned) -> None:
    host.claim(image=B.image)
    host.bake(B, motd="welcome")
    (host.root / "var/lib/worker").unlink()
    host.join()
    assert host.read("/var/lib/worker") == "data"


def test_image_of_the_settings_is_not_compared_with_the_annotations(host: Provisioned) -> None:
    host.claim(image=A.image)
    host.image = B.image
    host.join()
    assert host.world.booted == B.digest


def test_user_data_that_cannot_be_removed_is_logged(
    host: Provisioned, caplog: pytest.LogCaptureFixture
) -> None:
    path = node_paths.IGNITION_FILES[0]
    (host.root / path[1:]).unlink()
    (host.root / path[1:]).mkdir()
    host.join()
    assert f"remove it: rm {path}" in caplog.text
    assert_joined(host)


def kill_first_boot(root: Path, dies_at: int) -> Provisioned:
    """A machine whose files differ, and whose first boot is killed before a change."""
    root.mkdir()
    host = Provisioned(root)
    host.write("/etc/motd", "of another program")
    (root / "var/lib/worker").unlink()
    host.disk = DyingDisk(dies_at)
    host.join()
    return host


def test_verification_survives_a_kill_at_any_change(tmp_path: Path) -> None:
    whole = kill_first_boot(tmp_path / "whole", 0).disk
    assert isinstance(whole, DyingDisk)
    assert whole.changes > 10
    for number in range(1, whole.changes + 1):
        host = kill_first_boot(tmp_path / str(number), number)
        assert_joined(host)
        assert {path: host.read(path) for path in FILES} == FILES, number
        assert [host.read(path) for path in node_paths.IGNITION_FILES] == [None, None]
        assert host.read(ENCAPSULATED_BACKUP) is not None
        assert host.world.boots == 2


def test_served_config_without_annotations_is_logged(
    host: Provisioned, caplog: pytest.LogCaptureFixture
) -> None:
    (host.root / node_paths.FIRST_BOOT_ANNOTATIONS[1:]).unlink()
    host.join()
    assert f"{node_paths.FIRST_BOOT_ANNOTATIONS} is missing or names no config" in caplog.text
