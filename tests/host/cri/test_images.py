"""Images of a container runtime: the lab's, and containerd with crictl and a real registry.

Where TREENAIL_TEST_CONTAINERD names a directory with containerd and ctr, from version 2 on, and
TREENAIL_TEST_CRICTL the program crictl, the same tests run with them and with docker-registry.
"""

import base64
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.errors import CommandError, HostError
from treenail.host.cri.images import CRIO_PINS, ImageRuntime
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.process import stop_process
from treenail_lab import images
from treenail_lab.images import Credential, ImageCatalogue, make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine import settings
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.process

CONTAINERD = os.environ.get("TREENAIL_TEST_CONTAINERD", "")
CRICTL = os.environ.get("TREENAIL_TEST_CRICTL", "")
LOGIN = Credential("puller", "canary-51d2")
SOCKETS = {"crio": "run/crio/crio.sock", "containerd": "run/containerd/containerd.sock"}


class RecordingSystemd:
    """Records which units were reloaded."""

    def __init__(self) -> None:
        self.reloaded: list[str] = []

    def reload_unit(self, unit: str) -> None:
        self.reloaded.append(unit)


class RuntimeMachine:
    """A machine with a runtime, and two images that only `LOGIN` may pull."""

    def __init__(self, kind: str, directory: Path, path: str, pullable: tuple[str, ...]) -> None:
        self.kind, self.root, self.images = kind, directory / "root", pullable
        self.environ = {"PATH": f"{path}:/usr/bin:/bin"}
        self.socket = self.root / SOCKETS[kind]
        self.systemd = RecordingSystemd()
        self.machine = Machine(Root(self.root), clock=SystemClock(), environ=self.environ)
        self.machine.__dict__["systemd"] = self.systemd

    @property
    def login(self) -> str:
        return base64.b64encode(f"{LOGIN.username}:{LOGIN.password}".encode()).decode()

    def run_crictl(self, *words: str) -> str:
        argv = ["crictl", "--runtime-endpoint", f"unix://{self.socket}", "--image-endpoint",
                f"unix://{self.socket}", *words]  # fmt: skip
        return subprocess.run(
            argv, env=self.environ, check=True, stdout=subprocess.PIPE, text=True, timeout=60
        ).stdout

    def list_pinned(self) -> set[str]:
        """Return the images that the runtime itself reports as pinned."""
        listed = json.loads(self.run_crictl("images", "--output=json"))["images"]
        return {name for image in listed if image.get("pinned") for name in image["repoDigests"]}

    def collect_garbage(self) -> None:
        """Remove every image that is neither pinned nor in use, as the kubelet does."""
        self.run_crictl("rmi", "--prune")


@contextmanager
def make_lab_machine(kind: str, directory: Path) -> Iterator[RuntimeMachine]:
    pullable = tuple(make_image(f"app/{name}", "1", 1000, credential=LOGIN) for name in "ab")
    catalogue, settings_file = directory / "images.json", directory / "settings.json"
    images.save_catalogue(ImageCatalogue(pullable), catalogue)
    settings.save_settings(MachineSettings(pull_bytes_per_s=1e9), settings_file)
    on_path = directory / "bin"
    on_path.mkdir()
    specs = tuple(image.pull_spec for image in pullable)
    runtime = RuntimeMachine(kind, directory, str(on_path), specs)
    runtime.socket.parent.mkdir(parents=True)
    commands.install_programs(runtime.root, catalogue, settings_file, on_path=on_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime.socket))
        yield runtime


@contextmanager
def make_real_machine(directory: Path) -> Iterator[RuntimeMachine]:
    """Start containerd with directories of its own, and a registry with a login on loopback."""
    with ExitStack() as stack:
        port, specs = _start_registry(directory, stack)
        (directory / "bin").mkdir()
        for program in (CRICTL, f"{CONTAINERD}/ctr"):
            (directory / "bin" / Path(program).name).symlink_to(program)
        pullable = tuple(f"localhost:{port}/{spec}" for spec in specs)
        runtime = RuntimeMachine("containerd", directory, str(directory / "bin"), pullable)
        runtime.socket.parent.mkdir(parents=True)
        (runtime.root / "var/lib/containerd").mkdir(parents=True)
        config = directory / "containerd.toml"
        config.write_text(
            f'version = 3\nroot = "{runtime.root}/var/lib/containerd"\n'
            f'state = "{directory}/state"\n[grpc]\naddress = "{runtime.socket}"\n'
            # Not overlayfs, below which it may be. The transfer service unpacks for that alone.
            "[plugins.'io.containerd.cri.v1.images']\n"
            'snapshotter = "native"\nuse_local_image_pull = true\n'
        )
        _start(stack, directory, [f"{CONTAINERD}/containerd", "--config", str(config)])
        wait_until(runtime.socket.exists, limit_s=60.0)
        yield runtime


def _start_registry(directory: Path, stack: ExitStack) -> tuple[int, list[str]]:
    """Start a registry; return its port and two images as ``REPOSITORY@DIGEST``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    users = directory / "htpasswd"
    hashed = subprocess.run(
        ["htpasswd", "-niB", LOGIN.username], input=LOGIN.password, text=True,
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    users.write_text(hashed.stdout)
    config = directory / "registry.yml"
    config.write_text(
        json.dumps(
            {
                "version": "0.1",
                "storage": {"filesystem": {"rootdirectory": str(directory / "registry")}},
                "http": {"addr": f"127.0.0.1:{port}"},
                "auth": {"htpasswd": {"realm": "test", "path": str(users)}},
            }
        )
    )
    _start(stack, directory, ["docker-registry", "serve", str(config)])
    wait_until(lambda: _is_open(port), limit_s=60.0)
    return port, [f"{name}@{_push(port, name, directory)}" for name in "ab"]


def _push(port: int, name: str, directory: Path) -> str:
    """Push an image of one layer; return its digest."""
    source = directory / f"{name}.oci"
    (source / "blobs/sha256").mkdir(parents=True)

    def add_blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (source / "blobs/sha256" / digest).write_bytes(content)
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    layer = add_blob(archive.getvalue(), "layer.v1.tar")
    config = {
        "architecture": images.ARCHITECTURE,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add_blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [layer],
    }
    described = add_blob(json.dumps(manifest).encode(), "manifest.v1+json")
    (source / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (source / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    login = f"{LOGIN.username}:{LOGIN.password}"
    target = f"docker://localhost:{port}/{name}:1"
    options = ["--preserve-digests", "--dest-tls-verify=false", "--dest-creds", login]
    argv = ["skopeo", "copy", *options, f"oci:{source}", target]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return str(described["digest"])


def _start(stack: ExitStack, directory: Path, argv: list[str]) -> None:
    log = stack.enter_context((directory / f"{Path(argv[0]).name}.log").open("wb"))
    process = subprocess.Popen(argv, stdout=log, stderr=log)
    stack.callback(stop_process, process, 10.0)


def _is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=["crio", "containerd", "real"])
def runtime(request: pytest.FixtureRequest) -> Iterator[RuntimeMachine]:
    # A socket's path has at most 107 bytes.
    directory = owner.make_directory()
    try:
        if request.param == "real":
            if not (CONTAINERD and CRICTL):
                pytest.skip("TREENAIL_TEST_CONTAINERD and TREENAIL_TEST_CRICTL are not set")
            with make_real_machine(directory) as runtime:
                yield runtime
        else:
            with make_lab_machine(request.param, directory) as runtime:
                yield runtime
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def adapter(runtime: RuntimeMachine) -> Iterator[ImageRuntime]:
    adapter = ImageRuntime(runtime.machine)
    yield adapter
    adapter.pin_images((), adapter.list_images())
    runtime.collect_garbage()


def test_pull_without_its_login_or_image_fails(
    runtime: RuntimeMachine, adapter: ImageRuntime
) -> None:
    first, _ = runtime.images
    other = f"{first[:-64]}{'0' * 64}"
    for image, login in ((first, ""), (other, runtime.login)):
        with pytest.raises(CommandError) as caught:
            adapter.pull_image(image, login, timeout_s=60.0)
        assert image in str(caught.value) + caught.value.stderr
        assert LOGIN.password not in str(caught.value) + caught.value.stderr
    assert adapter.list_images() == frozenset()


def test_pulled_images_survive_a_collection_while_they_are_pinned(
    runtime: RuntimeMachine, adapter: ImageRuntime
) -> None:
    first, second = runtime.images
    assert adapter.list_images() == frozenset()
    for image in (first, first, second):
        adapter.pull_image(image, runtime.login, timeout_s=60.0)
        assert {first, second} & adapter.list_images() == {first, image}
    adapter.pin_images([first], [])
    assert runtime.list_pinned() == {first}
    runtime.collect_garbage()
    assert adapter.list_images() & {first, second} == {first}
    adapter.pin_images([first], [])
    assert runtime.list_pinned() == {first}
    adapter.pin_images([], [first])
    assert runtime.list_pinned() == set()
    runtime.collect_garbage()
    assert adapter.list_images() == frozenset()


def test_usable_bytes_leave_a_share_of_the_disk_free(
    runtime: RuntimeMachine, adapter: ImageRuntime
) -> None:
    (runtime.root / "var/lib/containerd").mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(runtime.root)
    assert adapter.read_usable_bytes() < usage.total * 0.85


def test_crio_reloads_its_drop_in_also_after_an_interrupted_change(tmp_path: Path) -> None:
    directory = owner.make_directory()
    with make_lab_machine("crio", directory) as runtime:
        adapter, drop_in = ImageRuntime(runtime.machine), runtime.root / CRIO_PINS.lstrip("/")
        adapter.pin_images(["r.example/a@sha256:1", "r.example/b@sha256:2"], [])
        assert drop_in.read_text() == (
            "[crio]\n  [crio.image]\n"
            '    pinned_images = ["r.example/a@sha256:1", "r.example/b@sha256:2"]\n'
        )
        adapter.pin_images(["r.example/a@sha256:1", "r.example/b@sha256:2"], [])
        adapter.pin_images([], [])
        assert not drop_in.exists()
        assert runtime.systemd.reloaded == ["crio.service"] * 3
    shutil.rmtree(directory)


def test_machine_without_a_runtime_says_which_sockets_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"expected one of /run/crio/crio.sock, /run/containerd"):
        ImageRuntime(Machine(Root(tmp_path), clock=SystemClock()))
