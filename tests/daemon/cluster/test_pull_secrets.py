import base64
import contextlib
import errno
import json
import logging
import os
from pathlib import Path

import pytest

from treenail.config.bootstrap_registry import (
    RECORD_FILE,
    BootstrapRegistryRecord,
    encode_record,
)
from treenail.config.node_paths import KUBECONFIG
from treenail.config.pullsecret import (
    PullSecret,
    decode_history,
    encode_pull_secret,
    parse_pull_secret,
)
from treenail.daemon.agent_settings import PartialSettings, merge_settings
from treenail.daemon.cluster.pull_secrets import LOGIN_HISTORY, PullSecrets
from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.log import MessageId
from treenail.update.steps.inventory import OWNERSHIP_FILE, Ownership, to_json

CLUSTER = "/var/lib/kubelet/config.json"
INTERNAL = "/etc/mco/internal-registry-pull-secret.json"
AUTH = "/var/lib/treenail/auth.json"
RUN = "/run/ostree/auth.json"
ETC = "/etc/ostree/auth.json"
CANARY = "hunter2canary"
SETTINGS = merge_settings(PartialSettings(), PartialSettings())


def secret(**passwords: str) -> bytes:
    """A pull secret with a password for each registry."""
    auths = {name: {"username": "me", "password": text} for name, text in passwords.items()}
    return json.dumps({"auths": auths}).encode()


def canonical(**passwords: str) -> bytes:
    return encode_pull_secret(parse_pull_secret(secret(**passwords), where="f"))


class Machine:
    """A machine's files, and an agent that can be started again."""

    def __init__(self, directory: Path) -> None:
        self.root = Root(directory)
        self.start()

    def start(self, disk: Disk | None = None) -> None:
        self.credentials = PullSecrets(self.root, HostFiles(self.root, disk), SETTINGS)

    def write(self, path: str, content: bytes) -> None:
        found = self.root.prefix / path[1:]
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_bytes(content)

    def remove(self, path: str) -> None:
        (self.root.prefix / path[1:]).unlink()

    def there(self, path: str) -> Path:
        return self.root.prefix / path[1:]

    def pulls_with(self) -> tuple[bytes | None, bytes | None]:
        """The secrets that rpm-ostree and bootc read."""
        found = [self.there(path) for path in (RUN, ETC)]
        run, etc = (each.read_bytes() if each.exists() else None for each in found)
        return run, etc

    def reboot(self) -> None:
        for path in self.there("/run").rglob("*.json*"):
            path.unlink()
        self.start()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_both_sources_are_merged_and_installed(machine):
    machine.write(CLUSTER, secret(both="cluster", quay="q"))
    machine.write(INTERNAL, secret(both="internal", internal="i"))
    assert machine.credentials.install_secrets() == ()
    expected = canonical(both="cluster", quay="q", internal="i")
    assert machine.pulls_with() == (expected, expected)
    assert machine.there(AUTH).stat().st_mode & 0o777 == 0o600


RECORD = BootstrapRegistryRecord("10.0.0.5:22625", "me", "boot", ("quay.io/example/os",))
BOOTSTRAP = {"10.0.0.5:22625": "boot"}


def test_login_of_bootstrap_registry_is_merged_while_its_record_exists(machine):
    machine.write(RECORD_FILE, encode_record(RECORD))
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (canonical(**BOOTSTRAP), canonical(**BOOTSTRAP))
    machine.write(CLUSTER, secret(quay="q"))
    machine.credentials.install_secrets()
    machine.reboot()
    machine.write(CLUSTER, secret(quay="rotated"))
    assert machine.credentials.install_secrets() == ()
    expected = canonical(quay="rotated", **BOOTSTRAP)
    assert machine.pulls_with() == (expected, expected)
    machine.remove(RECORD_FILE)
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (canonical(quay="rotated"), canonical(quay="rotated"))
    for path in machine.there(AUTH).parent.iterdir():
        assert b"10.0.0.5" not in path.read_bytes(), path


def test_invalid_record_of_bootstrap_registry_leaves_other_logins(machine):
    machine.write(RECORD_FILE, b"{")
    machine.write(CLUSTER, secret(quay="q"))
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (canonical(quay="q"), canonical(quay="q"))


def test_auth_links_are_relative(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    assert [os.fspath(machine.there(path).readlink()) for path in (RUN, ETC)] == [
        "../../var/lib/treenail/auth.json",
        "../../var/lib/treenail/auth.json",
    ]


def test_own_files_have_mode_0600(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(INTERNAL, secret(b="2"))
    machine.credentials.install_secrets()
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in machine.there(AUTH).parent.iterdir()
    }
    assert modes == {
        "auth.json": 0o600,
        "pull-secret.cluster.json": 0o600,
        "pull-secret.internal.json": 0o600,
    }


def test_missing_sources_make_pulls_anonymous(machine):
    assert machine.credentials.install_secrets() == ()
    assert list(machine.root.prefix.rglob("*")) == []


@pytest.mark.parametrize("empty", [b"", b"\n", b"{}", b'{"auths":{}}'])
def test_empty_sources_count_as_missing(machine, empty):
    machine.write(CLUSTER, empty)
    machine.write(INTERNAL, empty)
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (None, None)


def test_emptied_secrets_are_removed(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.write(CLUSTER, b"{}")
    assert machine.credentials.install_secrets() == ()
    for path in (RUN, ETC):
        assert not machine.there(path).is_symlink()
    assert not machine.there(AUTH).exists()


def test_removing_secrets_keeps_foreign_files(machine):
    machine.write(CLUSTER, b"{}")
    machine.write(ETC, b"theirs")
    machine.there(RUN).parent.mkdir(parents=True)
    machine.there(RUN).symlink_to("../their.json")
    assert machine.credentials.install_secrets() == ()
    assert machine.there(ETC).read_bytes() == b"theirs"
    assert machine.there(RUN).readlink() == Path("../their.json")


def test_changed_secret_is_installed_and_logged_once(machine, caplog):
    caplog.set_level(logging.INFO)
    for password in ("1", "1", "2", "2"):
        machine.write(CLUSTER, secret(a=password, b="x"))
        machine.credentials.install_secrets()
    assert machine.pulls_with() == (canonical(a="2", b="x"), canonical(a="2", b="x"))
    assert [(each.getMessage(), each.__dict__["message_id"]) for each in caplog.records] == [
        ("installed pull secrets with logins for 2 registries", MessageId.CREDENTIALS_CHANGED)
    ] * 2


class WriteProtected(Disk):
    """A disk that fails every change."""

    def create(self, path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    def fsync(self, descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def symlink(self, path: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


def test_installed_secrets_are_not_written_again(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(INTERNAL, secret(b="2"))
    machine.credentials.install_secrets()
    machine.start(WriteProtected())
    assert machine.credentials.install_secrets() == ()


def test_own_file_with_open_mode_is_restricted_again(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.there(AUTH).chmod(0o644)
    machine.credentials.install_secrets()
    assert machine.there(AUTH).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666, 0o700])
def test_bootstrap_kubeconfig_is_restricted_to_0600(machine, mode):
    machine.write(KUBECONFIG, b"users: [{user: {token: t}}]")
    machine.there(KUBECONFIG).chmod(mode)
    assert machine.credentials.install_secrets() == ()
    found = machine.there(KUBECONFIG)
    assert found.stat().st_mode & 0o777 == 0o600
    assert found.read_bytes() == b"users: [{user: {token: t}}]"
    inode = found.stat().st_ino
    machine.credentials.install_secrets()
    assert found.stat().st_ino == inode


def test_kubeconfig_of_the_config_keeps_its_mode(machine):
    machine.write(KUBECONFIG, b"users: []")
    machine.there(KUBECONFIG).chmod(0o644)
    machine.write(
        OWNERSHIP_FILE, json.dumps(to_json(Ownership("a", frozenset({KUBECONFIG})))).encode()
    )
    assert machine.credentials.install_secrets() == ()
    assert machine.there(KUBECONFIG).stat().st_mode & 0o777 == 0o644


def test_kubeconfig_becomes_private_beside_a_large_ownership_record(machine):
    machine.write(KUBECONFIG, b"users: []")
    machine.there(KUBECONFIG).chmod(0o644)
    paths = frozenset(f"/etc/a-directory-with-a-long-name-{n:0100d}/file" for n in range(10_000))
    machine.write(OWNERSHIP_FILE, json.dumps(to_json(Ownership("a", paths))).encode())
    assert machine.credentials.install_secrets() == ()
    assert machine.there(KUBECONFIG).stat().st_mode & 0o777 == 0o600


def test_kubeconfig_that_is_a_symlink_is_unchanged(machine):
    machine.write("/etc/kubernetes/other", b"users: []")
    machine.there("/etc/kubernetes/other").chmod(0o644)
    machine.there(KUBECONFIG).symlink_to("other")
    assert machine.credentials.install_secrets() == ()
    assert machine.there(KUBECONFIG).is_symlink()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("content", [b"{", b'{"auths": {"a": 5}}', b"x" * 2_000_000])
def test_source_that_is_invalid_keeps_its_last_valid_logins(machine, content, restarted):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(INTERNAL, secret(b="2"))
    machine.credentials.install_secrets()
    machine.write(CLUSTER, content)
    machine.write(INTERNAL, secret(b="3"))
    if restarted:
        machine.reboot()
    (problem,) = machine.credentials.install_secrets()
    assert CLUSTER in problem
    assert problem.endswith("; its last valid logins stay in use")
    assert machine.pulls_with() == (canonical(a="1", b="3"), canonical(a="1", b="3"))


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_source_that_is_truncated_keeps_its_last_valid_logins(machine, content):
    """A shell that rewrites a file empties it first."""
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.write(CLUSTER, content)
    machine.reboot()
    (problem,) = machine.credentials.install_secrets()
    assert problem == (
        f'{CLUSTER} is empty; its last valid logins stay in use; write {{"auths": {{}}}} into it '
        "to remove them"
    )
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


@pytest.mark.parametrize("path", [CLUSTER, INTERNAL])
def test_source_that_vanishes_keeps_its_last_valid_logins(machine, path):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(INTERNAL, secret(b="2"))
    machine.credentials.install_secrets()
    machine.remove(path)
    machine.reboot()
    assert machine.credentials.install_secrets() == (
        f"{path} no longer exists; its last valid logins stay in use",
    )
    assert machine.pulls_with() == (canonical(a="1", b="2"), canonical(a="1", b="2"))


def test_source_that_is_fixed_is_used_and_no_longer_reported(machine):
    machine.write(CLUSTER, b"{")
    assert machine.credentials.install_secrets() == (
        (
            f"cannot parse pull secret {CLUSTER}: it is not a JSON object; "
            "it has no earlier valid content"
        ),
    )
    machine.write(CLUSTER, secret(a="1"))
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


def test_source_that_was_never_valid_leaves_the_other_in_use(machine):
    machine.write(CLUSTER, b"{")
    machine.write(INTERNAL, secret(b="2"))
    assert len(machine.credentials.install_secrets()) == 1
    assert machine.pulls_with() == (canonical(b="2"), canonical(b="2"))


def test_unreadable_sources_keep_installed_secrets(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.write(CLUSTER, b"{")
    machine.write("/var/lib/treenail/pull-secret.cluster.json", b"damaged too")
    problems = machine.credentials.install_secrets()
    assert len(problems) == 2
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


def test_link_in_run_is_restored_after_reboot(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.reboot()
    assert machine.pulls_with() == (None, canonical(a="1"))
    machine.credentials.install_secrets()
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


@pytest.mark.parametrize("target", [CLUSTER, "/nowhere/auth.json"])
def test_foreign_and_dangling_links_are_replaced(machine, target):
    machine.write(CLUSTER, secret(a="1"))
    for path in (RUN, ETC):
        machine.there(path).parent.mkdir(parents=True)
        machine.there(path).symlink_to(target)
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


def test_users_file_in_etc_is_unchanged_and_reported(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(ETC, b"theirs")
    (problem,) = machine.credentials.install_secrets()
    assert problem == (
        "cannot link /etc/ostree/auth.json to the cluster's pull secrets: another program's file "
        "exists at this path; remove it, or pulls that read it go without them"
    )
    assert machine.pulls_with() == (canonical(a="1"), b"theirs")


def test_file_in_run_is_backed_up_with_mode_0600(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(RUN, b"theirs")
    assert machine.credentials.install_secrets() == ()
    aside = machine.there("/run/ostree/auth.json.before-treenail")
    assert (aside.read_bytes(), aside.stat().st_mode & 0o777) == (b"theirs", 0o600)
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))


class Watched(Disk):
    """A disk where after every call there has to be something to pull with."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.seen: set[tuple[bytes | None, bytes | None]] = set()

    def _look(self) -> None:
        self.seen.add(self._machine.pulls_with())

    def replace(self, path: Path, target: Path) -> None:
        self._look()
        super().replace(path, target)
        self._look()

    def symlink(self, path: Path, text: str) -> None:
        super().symlink(path, text)
        self._look()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._look()


def test_pull_secret_exists_at_every_moment(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.remove(RUN)
    machine.write(RUN, b"theirs")
    machine.remove(ETC)
    machine.there(ETC).symlink_to("../../var/lib/kubelet/config.json")
    old = machine.pulls_with()
    machine.write(CLUSTER, secret(a="2"))
    disk = Watched(machine)
    machine.start(disk)
    machine.credentials.install_secrets()
    new = canonical(a="2")
    assert old[0] == b"theirs"
    assert disk.seen == {
        (b"theirs", secret(a="2")),
        (new, secret(a="2")),
        (new, new),
    }


class Failing(Disk):
    """A disk whose every call from one on fails."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.EIO, "Input/output error")

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def open(self, path: Path) -> int:
        self._count()
        return super().open(path)

    def read(self, descriptor: int, size: int) -> bytes:
        self._count()
        return super().read(descriptor, size)

    def write(self, descriptor: int, content: bytes) -> int:
        self._count()
        return super().write(descriptor, content)

    def fsync(self, descriptor: int) -> None:
        self._count()
        super().fsync(descriptor)

    def replace(self, path: Path, target: Path) -> None:
        self._count()
        super().replace(path, target)

    def symlink(self, path: Path, text: str) -> None:
        self._count()
        super().symlink(path, text)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


def full_of_canaries(machine: Machine, cluster: bytes) -> None:
    machine.write(CLUSTER, cluster)
    machine.write(INTERNAL, secret(internal=CANARY))
    machine.write(RUN, secret(theirs=CANARY))
    machine.write(ETC, secret(theirs=CANARY))


BROKEN = [
    secret(a=CANARY),
    secret(a=CANARY)[:-3],
    CANARY.encode(),
    json.dumps({"auths": {CANARY: {"auth": CANARY}}}).encode(),
    json.dumps({"auths": {f"{CANARY} {CANARY}": {}}}).encode(),
    json.dumps({"auths": CANARY}).encode(),
    json.dumps({CANARY: CANARY}).encode(),
    b"\xff" + CANARY.encode(),
    CANARY.encode() * 200_000,
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_failure_prints_no_secret(machine, number, caplog):
    caplog.set_level(logging.DEBUG)
    printed: list[str] = []
    for calls in range(80):
        full_of_canaries(machine, BROKEN[number])
        machine.start(Failing(calls))
        printed += machine.credentials.install_secrets()
        machine.start()
        printed += machine.credentials.install_secrets()
        printed.append(repr(machine.credentials))
    text = "\n".join([*printed, caplog.text, *(repr(each.__dict__) for each in caplog.records)])
    assert len(printed) > 80
    for forbidden in (CANARY, base64.b64encode(f"me:{CANARY}".encode()).decode()):
        assert forbidden not in text


def test_failing_disk_is_reported_and_installed_secrets_stay(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.write(CLUSTER, secret(a="2"))
    machine.start(WriteProtected())
    problems = machine.credentials.install_secrets()
    kept = machine.there("/var/lib/treenail/pull-secret.cluster.json")
    assert problems[-1].startswith("cannot flush")
    assert machine.pulls_with() == (canonical(a="1"), canonical(a="1"))
    assert kept.read_bytes() == canonical(a="1")


def test_directory_at_path_of_link_is_reported(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.there(ETC).mkdir(parents=True)
    assert machine.credentials.install_secrets() == (
        f"cannot read {machine.there(ETC)}: it is not a regular file",
    )


IMAGE = "a/os@sha256:" + "0" * 64


def test_previous_login_returns_after_rejection_also_after_restart(machine):
    machine.write(CLUSTER, secret(a="1", b="x"))
    machine.credentials.install_secrets()
    machine.credentials.confirm_login(IMAGE)
    machine.write(CLUSTER, secret(a="2", b="y"))
    assert machine.credentials.install_secrets() == ()
    assert machine.pulls_with()[0] == canonical(a="2", b="y")
    assert machine.credentials.handle_rejected_login(IMAGE)
    machine.reboot()
    assert machine.credentials.install_secrets() == (
        "registry a rejected the newest credential; the previous one stays in use",
    )
    assert machine.pulls_with()[0] == canonical(a="1", b="y")
    assert machine.there(LOGIN_HISTORY).stat().st_mode & 0o777 == 0o600
    machine.write(CLUSTER, secret(a="3", b="y"))
    assert machine.credentials.install_secrets() == ()
    machine.credentials.confirm_login(IMAGE)
    assert not machine.credentials.handle_rejected_login(IMAGE), "older credentials are not needed"


def test_rejected_login_without_previous_one_stays(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    assert not machine.credentials.handle_rejected_login(IMAGE)
    assert not machine.credentials.handle_rejected_login("elsewhere.example/os")
    assert machine.pulls_with()[0] == canonical(a="1")


def test_login_history_is_removed_with_last_login(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.credentials.install_secrets()
    machine.credentials.confirm_login(IMAGE)
    machine.write(CLUSTER, b"{}")
    machine.credentials.install_secrets()
    assert not machine.there(LOGIN_HISTORY).exists()


def test_previous_login_survives_failure_at_any_disk_call(machine):
    for calls in range(60):
        machine.start()
        machine.write(CLUSTER, secret(a="1"))
        machine.credentials.install_secrets()
        machine.credentials.confirm_login(IMAGE)
        machine.write(CLUSTER, secret(a="2"))
        machine.start(Failing(calls))
        machine.credentials.install_secrets()
        with contextlib.suppress(FileError):
            machine.credentials.handle_rejected_login(IMAGE)
        machine.start()
        machine.credentials.install_secrets()
        machine.credentials.handle_rejected_login(IMAGE)
        assert machine.pulls_with()[0] in {canonical(a="1"), canonical(a="2")}
        machine.credentials.handle_rejected_login(IMAGE)
        assert canonical(a="1") in {machine.pulls_with()[0], kept(machine)}


def kept(machine: Machine) -> bytes:
    return encode_pull_secret(
        PullSecret(decode_history(machine.there(LOGIN_HISTORY).read_bytes(), where="f").last_good)
    )


def test_damaged_login_history_is_started_again(machine):
    machine.write(CLUSTER, secret(a="1"))
    machine.write(LOGIN_HISTORY, CANARY.encode())
    assert machine.credentials.install_secrets() == ()
    machine.credentials.confirm_login(IMAGE)
    assert kept(machine) == canonical(a="1")
