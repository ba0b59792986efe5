"""The parts of a lab for builds of OS images: a registry with an OS image, and a Node.

The OS image is small: a shell and some programs of this host, with libraries. Its layer has no
times and no owners of this host, so the same host gives the same digest.
"""

import base64
import gzip
import hashlib
import io
import json
import logging
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from treenail.clocks import SystemClock
from treenail.errors import HostError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import CONTROLLERCONFIGS, NODES
from treenail.oci_content import OCI_MANIFEST
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.names import Descriptor
from treenail.registry.transport import TlsSettings
from treenail.registry.uploads import upload_blob
from treenail_lab.apiserver.access.certificates import write_private_file
from treenail_lab.apiserver.controllers.pods import BUILDER_LABEL
from treenail_lab.images import ARCHITECTURE, Credential, Image, find_layer_file
from treenail_lab.kubelet import runtime
from treenail_lab.kubelet.kubelet import Kubelet
from treenail_lab.kubelet.pod_worker import LOGS, KubeletPlaces
from treenail_lab.kubelet.runtime import PortForward
from treenail_lab.machine.container.remote import RemoteImages
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

_PROGRAMS = (
    "sh", "cat", "cp", "mkdir", "rm", "ln", "ls", "mv", "touch", "chmod", "echo", "true", "false",
    "sleep", "head", "env", "uname", "test", "dd", "id",
)  # fmt: skip
_LINKS = {
    "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64",
    "home": "var/home", "root": "var/roothome", "opt": "var/opt",
}  # fmt: skip
_LIBRARY = re.compile(r"(/\S+) \(0x")
_DIRECTORIES = ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "var", "tmp", "dev", "proc",
                "sys", "run")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabBaseImage:
    """The blobs of an image: one layer, its config and its manifest."""

    layer: bytes
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        return _compute_digest(self.manifest)


def build_base_image(version: str) -> LabBaseImage:
    """Build the image from programs of this host."""
    tree = dict(_collect_files())
    release = f'NAME="Lab OS"\nID=lab\nVERSION="{version}"\nOSTREE_VERSION="{version}"\n'
    texts = {
        "usr/lib/os-release": release,
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
        "etc/group": "root:x:0:\n",
    }
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in _DIRECTORIES:
            _add(archive, name, kind=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, target in _LINKS.items():
            _add(archive, name, kind=tarfile.SYMTYPE, target=target)
        for name, text in texts.items():
            _add(archive, name, text.encode())
        for name in sorted(tree):
            _add(archive, name, tree[name].read_bytes(), mode=0o755)
    layer = gzip.compress(unpacked.getvalue(), 6, mtime=0)
    labels = {"org.opencontainers.image.version": version, "containers.bootc": "1"}
    config = _dump(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {"Labels": labels, "Env": ["PATH=/usr/sbin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_compute_digest(unpacked.getvalue())]},
            "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "treenail-lab"}],
        }
    )
    oci = "application/vnd.oci.image"
    manifest = _dump(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _describe(f"{oci}.config.v1+json", config),
            "layers": [_describe(f"{oci}.layer.v1.tar+gzip", layer)],
        }
    )
    return LabBaseImage(layer, config, manifest)


def push_base_image(client: RegistryClient, repository: str, tag: str, image: LabBaseImage) -> None:
    """Push the image with its tag."""
    for content in (image.layer, image.config):
        blob = Descriptor("application/octet-stream", _compute_digest(content), len(content))
        upload_blob(client, repository, blob, lambda content=content: io.BytesIO(content))  # type: ignore[misc]
    client.put_manifest(repository, tag, OCI_MANIFEST, image.manifest)


def _collect_files() -> Iterator[tuple[str, Path]]:
    """Yield the path in the image and the file of each program and its libraries."""
    for name in _PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        if program is None:
            if name == "sh":
                raise HostError("cannot make an OS image: this host has no /bin/sh")
            continue
        yield f"usr/bin/{name}", Path(program).resolve()
        done = subprocess.run(
            ["ldd", program], capture_output=True, check=False, text=True, timeout=10.0
        )
        for library in _LIBRARY.findall(done.stdout):
            path = Path(library)
            place = path.relative_to("/")
            yield str(place if place.parts[0] == "usr" else Path("usr") / place), path.resolve()


def _add(
    archive: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname, member.size = kind, mode, target, len(content)
    archive.addfile(member, io.BytesIO(content))


def _describe(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _compute_digest(content), "size": len(content)}


def _dump(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _compute_digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


log = logging.getLogger(__name__)

BUILDER = "builder-0"
BASE_REPOSITORY = "os/base"
CERTIFICATES = "etc/containers/certs.d"


def find_build_refusal() -> tuple[str, str]:
    """Return why this host cannot build a Containerfile, and the remedy; empty if it can."""
    if shutil.which("buildah") is None:
        return "buildah is not installed", "install the package buildah"
    if why := runtime.find_refusal():
        return why, "run the lab as root, on a host that allows namespaces"
    return "", ""


class LabRegistry:
    """A registry with one OS image, while entered; ``version`` is that of the image."""

    def __init__(self, directory: Path, version: str) -> None:
        self._directory = directory
        self._version = version
        self.service = RegistryService()
        self.installed: Image
        """The OS image that machines are installed from."""

    @property
    def host(self) -> str:
        return self.service.host

    @property
    def ca_pem(self) -> str:
        return self.service.ca_file.read_text("ascii")

    @property
    def push_login(self) -> bytes:
        """Return a ``.dockerconfigjson`` that may push."""
        return self.service.make_auth_json(PUSHER)

    @property
    def pull_login(self) -> bytes:
        return self.service.make_auth_json(PULLER)

    def __enter__(self) -> Self:
        self.service.__enter__()
        try:
            self.installed = self._push_base(build_base_image(self._version))
        except BaseException:
            self.service.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.service.__exit__()

    def write_certificate(self, root: Path) -> None:
        """Let the programs of a machine trust the registry."""
        place = root / CERTIFICATES / self.host / "ca.crt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self.ca_pem, "ascii")

    def open_client(self, user: str = PUSHER) -> RegistryClient:
        """Return a client of the registry; the caller closes it."""
        login = Login(user, self.service.passwords[user])
        return RegistryClient(
            self.host, SystemClock(), login=login, tls=TlsSettings(ca_pem=self.ca_pem)
        )

    def _push_base(self, built: LabBaseImage) -> Image:
        client = self.open_client()
        try:
            push_base_image(client, BASE_REPOSITORY, self._version, built)
        finally:
            client.close()
        self.write_certificate(self._directory)
        credential = Credential(PULLER, self.service.passwords[PULLER])
        pull_spec = f"{self.host}/{BASE_REPOSITORY}@{built.digest}"
        image = RemoteImages(self._directory, pull_spec, lambda _: credential).resolve()
        layer = find_layer_file(self._directory, image.layers[0].digest)
        layer.parent.mkdir(exist_ok=True)
        layer.write_bytes(built.layer)
        return image


class BuilderNode:
    """The Node for builds: its kubelet runs pods that reach registries on loopback only."""

    def __init__(
        self,
        directory: Path,
        admin: Client,
        *registry_hosts: str,
        hidden: Sequence[Path] = (),
        name: str = BUILDER,
    ) -> None:
        self.name = name
        self._directory = directory
        self._admin = admin
        self._registry_ports = [int(host.rpartition(":")[2]) for host in registry_hosts]
        # Logins of the API server and of the registry.
        self._hidden = (directory, *hidden)
        self._kubelet: Kubelet | None = None

    def create_node(self) -> None:
        """Create the Node; its condition Ready says why this host cannot build."""
        labels: Json = {
            BUILDER_LABEL: "",
            "kubernetes.io/arch": ARCHITECTURE,
            "kubernetes.io/os": "linux",
            "kubernetes.io/hostname": BUILDER,
        }
        node: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": BUILDER, "labels": labels},
        }
        self._admin.create(NODES, node)
        why, remedy = find_build_refusal()
        if why:
            condition: Json = {
                "type": "Ready",
                "status": "False",
                "reason": "CannotBuild",
                "message": f"{why}: {remedy}",
            }
            body: Json = {"status": {"conditions": [condition]}}
            self._admin.patch(NODES, BUILDER, body, subresource="status")

    def start(self, client: Client) -> None:
        """Start the kubelet with a client of the Node, if this host can build."""
        why, _ = find_build_refusal()
        if why:
            log.info("no builds of Containerfiles: %s", why)
            return
        forwards = tuple(
            PortForward(self._directory / f"registry-{number}.sock", port)
            for number, port in enumerate(self._registry_ports)
        )
        places = KubeletPlaces(self._directory / BUILDER, self._hidden, forwards, {})
        self._kubelet = Kubelet(self.name, client, places, SystemClock())
        self._kubelet.start()

    def stop(self) -> None:
        """Kill the containers."""
        if self._kubelet is not None:
            self._kubelet.stop()

    def kill_container(self, pod_uid: str, container: str) -> bool:
        """Kill a container of a build with SIGKILL; return whether it ran."""
        return self._kubelet is not None and self._kubelet.kill_container(pod_uid, container)

    @property
    def log_directory(self) -> Path:
        return self._directory / BUILDER / LOGS


def print_registry_access(registry: LabRegistry, directory: Path, stream: TextIO) -> None:
    """Write the logins and the certificate to files, and print how a program uses them."""
    files = {"push.json": registry.push_login, "pull.json": registry.pull_login}
    for name, login in files.items():
        write_private_file(directory / name, login)
    certificates = directory / CERTIFICATES / registry.host
    print(f"# registry: {registry.host}, certificate in {certificates}", file=stream)
    print(f"# logins: {', '.join(str(directory / name) for name in files)}", file=stream)
    print(
        f"# try: skopeo inspect --authfile {directory / 'pull.json'} --cert-dir {certificates} "
        f"docker://{registry.host}/{BASE_REPOSITORY}:{registry.installed.version}",
        file=stream,
    )
    why, remedy = find_build_refusal()
    if why:
        print(f"# no builds with RUN: {why}: {remedy}", file=stream)
    stream.flush()


def build_login_secret(name: str, namespace: str, login: bytes) -> Json:
    """Return a Secret of the type dockerconfigjson."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": name, "namespace": namespace},
        "data": {".dockerconfigjson": base64.b64encode(login).decode()},
    }


def merge_logins(*documents: bytes | str) -> str:
    """Return a pull secret with the logins of all documents."""
    auths: Json = {}
    for document in documents:
        auths |= json.loads(document)["auths"]
    return json.dumps({"auths": auths})


def build_controller_config(registry: LabRegistry) -> Json:
    """Return the ControllerConfig by which agents and builds trust the registry."""
    bundle: Json = {
        # ConfigMap keys allow no colon, so the MCO writes host..port.
        "file": registry.host.replace(":", ".."),
        "data": base64.b64encode(registry.ca_pem.encode()).decode(),
    }
    spec: Json = {
        "imageRegistryBundleUserData": [bundle],
        "additionalTrustBundle": bundle["data"],
        "internalRegistryPullSecret": base64.b64encode(registry.pull_login).decode(),
    }
    return {
        "apiVersion": CONTROLLERCONFIGS.api_version,
        "kind": CONTROLLERCONFIGS.kind,
        "metadata": {"name": "machine-config-controller"},
        "spec": spec,
    }
