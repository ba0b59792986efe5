"""Installations that fail: what breaks each, what the user must read, and the fix."""

import base64
import datetime as dt
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.installer.pool_builds import InstallSite
from tests.installer.test_certificate_checks import make_certificate
from tests.registry.images import make_client, push_image
from treenail_lab.registry.service import PULLER, PUSHER

UNKNOWN = "sha256:" + "0" * 64
WRONG_LOGIN = base64.b64encode(b"puller:Canary-wrong-4").decode()


@dataclass(frozen=True, slots=True)
class FailedInstall:
    """Texts that a failed installation must print."""

    step: str
    reason: tuple[str, ...]
    """Parts of the sentence."""
    remedy: str
    arguments: tuple[str, ...] = ()
    """Options of the failing start."""
    files: tuple[str, ...] = ()
    """Parts of the log bundle that an outsider reads next."""


@dataclass(slots=True)
class BrokenSite:
    """The directory of an installation, and its cluster."""

    install: InstallSite
    needs_cluster: bool = True
    can_hand_over: bool = True
    can_join: bool = True
    has_controller: bool = False
    """Whether the controller ``install`` itself runs in the cluster, not a stand-in."""
    loses_registry: bool = False
    """Whether the bootstrap registry loses its content before the controller begins."""
    asks_at: int = 0
    """Port of the config server that a machine asks; it never pulls an image. 0 for none."""
    has_containerfile: bool = False
    fixed_arguments: tuple[str, ...] = field(default_factory=tuple)
    published: list[dict[str, object]] = field(default_factory=list)
    """Secrets that the cluster had at its last stop: a later one begins with them."""

    def edit_manifests(self, old: str, new: str) -> None:
        for path in self.install.directory.manifests.iterdir():
            path.write_text(path.read_text().replace(old, new))


Breakage = Callable[[BrokenSite], Iterator[FailedInstall]]


def break_instruction(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.text = "FROM configs AS final\nRUN true\nRUN echo the cause >&2; exit 3\n"
    site.install.write()
    yield FailedInstall(
        "build:master",
        ("InstructionFailed", "line 3 of the Containerfile", "the cause"),
        "correct",
        files=("logs/builds/master/attempt-1/Containerfile", "attempt-1/output.log"),
    )
    site.install.text = "FROM configs AS final\nRUN true\n"
    site.install.write()


def break_containerfile(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.text = "FROM configs AS final\nRUM true\n"
    site.install.write()
    yield FailedInstall("build:master", ("line 2", "RUM"), "")
    site.install.text = ""
    site.install.write()


def break_base(site: BrokenSite) -> Iterator[FailedInstall]:
    base = site.install.base
    site.install.base = f"{base.partition('@')[0]}@{UNKNOWN}"
    site.install.write()
    yield FailedInstall("build:master", ("BaseNotFound", UNKNOWN), "")
    site.install.base = base
    site.install.write()


def break_architecture(site: BrokenSite) -> Iterator[FailedInstall]:
    base, client = site.install.base, make_client(site.install.registry)
    digest = push_image(client, "os/base", "arm", architecture="s390x").digest
    client.close()
    site.install.base = f"{base.partition('@')[0]}@{digest}"
    site.install.write()
    yield FailedInstall("build:master", ("s390x",), "")
    site.install.base = base
    site.install.write()


def break_login(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    right = json.loads(site.install.registry.make_auth_json(PULLER))
    wrong = {"auths": {name: {"auth": WRONG_LOGIN} for name in right["auths"]}}
    encoded = [base64.b64encode(json.dumps(each).encode()).decode() for each in (right, wrong)]
    site.edit_manifests(*encoded)
    yield FailedInstall("build:master", ("BaseLoginRefused",), "Secret")
    site.edit_manifests(*reversed(encoded))


def break_disk(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    yield FailedInstall(
        "start",
        ("cannot start the bootstrap registry", "free"),
        "--registry-storage-limit",
        ("--registry-storage-limit=900000Gi",),
    )


def break_deadline(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.text = "FROM configs AS final\nRUN sleep 60\n"
    site.install.write()
    yield FailedInstall(
        "build:master", ("DeadlineExceeded",), "--build-timeout", ("--build-timeout=2s",)
    )
    site.install.text = ""
    site.install.write()


def break_first_boot(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    site.needs_cluster = False
    yield FailedInstall(
        "first-boot",
        ("the time limit of 1s has passed",),
        "--first-boot-timeout",
        ("--first-boot-timeout=1s",),
    )
    site.needs_cluster = True


def break_hand_over(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    site.can_hand_over = False
    yield FailedInstall(
        "hand-over",
        ("the time limit of 2s has passed", "waiting for controller install", "kept in"),
        "--handover-deadline",
        ("--handover-deadline=2s",),
        files=("registry/manifests/os/node/",),
    )
    site.can_hand_over = True


def break_join(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    site.can_join = False
    yield FailedInstall(
        "nodes",
        ("the time limit of 3s has passed", "0 of 3 machines of the control plane have joined"),
        "treenail-controller machines",
        ("--handover-deadline=3s", "--control-plane-machines=3"),
    )
    site.can_join = True


def break_clock(site: BrokenSite) -> Iterator[FailedInstall]:
    """A host whose clock is a day late: to it, certificates of today begin tomorrow."""
    site.install.write()
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    begin = now + day - dt.timedelta(minutes=1)
    paths = (site.install.directory.ca_certificate, site.install.directory.ca_key)
    paths[0].parent.mkdir()
    for path, content in zip(paths, make_certificate(begin, now + 10 * day), strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
    yield FailedInstall(
        "start",
        (
            f"with this host's clock, which shows {now:%Y-%m-%d}",
            f"{paths[0]} is valid from {begin:%Y-%m-%dT%H:%M}",
        ),
        "chronyc makestep",
    )
    # A test cannot set the clock: the certificates become those of a day ago.
    for path in paths:
        path.unlink()


def break_final_login(site: BrokenSite) -> Iterator[FailedInstall]:
    """The final registry has accepted the login at prepare, and refuses the push at the end."""
    site.has_controller = True
    site.install.final = site.install.registry.host
    site.install.pusher = PULLER
    site.install.write()
    yield FailedInstall(
        "hand-over",
        ("the time limit of 20s has passed", "pool master:", "renderedImagePushSecret", "kept in"),
        "--handover-deadline",
        ("--handover-deadline=20s",),
    )
    site.install.pusher = PUSHER
    site.install.write()


def break_registry(site: BrokenSite) -> Iterator[FailedInstall]:
    """The bootstrap registry is gone before the hand-over."""
    site.has_controller = site.loses_registry = True
    site.install.final = site.install.registry.host
    site.install.write()
    yield FailedInstall(
        "hand-over",
        ("the time limit of 20s has passed", "pool master:", "does not have sha256:"),
        "--handover-deadline",
        ("--handover-deadline=20s",),
        files=("logs/registry-pull.log",),
    )
    site.loses_registry = False


def break_machine_registry(site: BrokenSite) -> Iterator[FailedInstall]:
    """A machine gets its config, and cannot reach the registry."""
    site.install.write()
    site.needs_cluster = False
    with take_port() as port:
        site.asks_at = port
    yield FailedInstall(
        "first-boot",
        (
            "the time limit of 20s has passed",
            "127.0.0.1 got the config, and no machine has pulled its image from 127.0.0.1:",
        ),
        "--first-boot-timeout",
        ("--first-boot-timeout=20s", f"--listen=127.0.0.1:{port}"),
        files=("logs/config-server.log", "logs/registry-pull.log"),
    )
    site.needs_cluster, site.asks_at = True, 0


def break_port(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    with take_port() as port:
        yield FailedInstall(
            "start",
            (f"cannot listen on 127.0.0.1:{port}", "in use"),
            "--listen",
            (f"--listen=127.0.0.1:{port}",),
        )


def break_registry_port(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    with take_port() as port:
        yield FailedInstall(
            "start",
            (f"another program listens on 127.0.0.1:{port}",),
            "--registry-listen",
            (f"--registry-listen=127.0.0.1:{port}",),
        )


def break_manifest(site: BrokenSite) -> Iterator[FailedInstall]:
    site.install.write()
    path = site.install.directory.manifests / "50-mine.yaml"
    path.write_text("kind: MachineConfig\nmetadata: {name: 50-mine\n")
    yield FailedInstall("start", ("manifests/50-mine.yaml", "line 3"), "")
    path.unlink()


@contextmanager
def take_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


FAILURES: dict[str, Breakage] = {
    "instruction": break_instruction,
    "containerfile": break_containerfile,
    "base": break_base,
    "architecture": break_architecture,
    "login": break_login,
    "disk": break_disk,
    "deadline": break_deadline,
    "first_boot": break_first_boot,
    "hand_over": break_hand_over,
    "join": break_join,
    "clock": break_clock,
    "final_login": break_final_login,
    "registry": break_registry,
    "machine_registry": break_machine_registry,
    "port": break_port,
    "registry_port": break_registry_port,
    "manifest": break_manifest,
}
NEEDS_BUILDAH = frozenset({"instruction", "deadline"})


def list_names(root: Path) -> list[str]:
    """Paths below a directory, for messages of failed tests."""
    return sorted(str(each.relative_to(root)) for each in root.rglob("*"))
