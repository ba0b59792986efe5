"""Answers of programs on the node, and files of its administrator."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.fakes.clock import FakeClock
from tests.fuzz.target import ROOT, FuzzTarget, Grammar
from tests.fuzz.targets.scratch import make_directory
from tests.host.bootc import test_status
from treenail import deployment_change
from treenail.builder.failures import classify_failure
from treenail.builder.images.packages import parse_dpkg_status, parse_header
from treenail.daemon.agent_settings import PartialSettings, merge_settings, parse_settings
from treenail.encoding.json_text import parse_json
from treenail.errors import CommandError
from treenail.host.bootc.progress import BootcProgress
from treenail.host.bootc.status import is_composefs, parse_status
from treenail.host.container.podman import PodmanProgress
from treenail.host.container.registry import SkopeoClient
from treenail.host.ostree.backend_settings import find_remedy
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.host.rpmostree.client import RpmOstreeProgress, _parse_deployments
from treenail.host.systemd.system_bus import BusSignal
from treenail.kube.transport.credentials import read_node_name
from treenail.kube.transport.kubeconfig import ApiServerConfig, read_kubeconfig
from treenail.sanitize import sanitize_text
from treenail.update.checks.signature_policy import find_rule, find_storage_rule
from treenail_lab.apiserver.access.certificates import CertificateAuthority

_DIGEST = "sha256:" + "1" * 64
_IMAGE = f"quay.io/os/node@{_DIGEST}"


class OneAnswer:
    """Runs every program with the same output, or the same failure."""

    def __init__(self, output: bytes, *, has_failed: bool) -> None:
        self._output = output
        self._has_failed = has_failed

    def run_command(self, argv: object, **_: object) -> bytes:
        if self._has_failed:
            text = sanitize_text(self._output.decode("utf-8", "replace"))
            raise CommandError(f"skopeo failed: {text}", stderr=text)
        return self._output


def read_bootc_status(content: bytes) -> Iterable[str]:
    """Read ``bootc status --json``."""
    is_composefs(content)
    found = parse_status(content)
    status = DeploymentStatus(found.in_boot_order)
    return [str(status.booted), str(status.pending), str(status.rollback), found.origin_path]


def read_bootc_progress(content: bytes) -> Iterable[str]:
    """Read the progress that bootc writes to its FIFO, in two pieces."""
    progress = BootcProgress()
    middle = len(content) // 2
    progress.feed_chunk(content[:middle])
    progress.feed_chunk(content[middle:] + b"\n")
    return [str(progress.last_progress)]


def read_rpm_ostree(content: bytes) -> Iterable[str]:
    """Read the properties of rpm-ostreed, and its signals; JSON stands for the types of D-Bus."""
    try:
        document = parse_json(content)
    except ValueError:
        return ()
    if not isinstance(document, dict):
        return ()
    active = document.get("ActiveTransaction")
    if isinstance(active, list):
        document["ActiveTransaction"] = tuple(active)
    found = _parse_deployments(document)
    progress = RpmOstreeProgress()
    signals = document.get("signals")
    for each in signals if isinstance(signals, list) else ():
        if isinstance(each, list) and each and isinstance(each[0], str):
            progress.read_signal(BusSignal(each[0], tuple(each[1:])))
    find_remedy(str(document.get("error")), "")
    return [str(found.booted), str(found.pending), str(found.transaction), str(progress.progress)]


def read_skopeo(content: bytes) -> Iterable[str]:
    """Read the output of ``skopeo inspect``, and the same bytes as its error."""
    shown = []
    for has_failed in (False, True):
        client = SkopeoClient(OneAnswer(content, has_failed=has_failed), FakeClock(), timeout_s=1)  # type: ignore[arg-type]
        shown += [str(client.inspect_image(_IMAGE)), str(client.list_platforms(_IMAGE))]
    return shown


def read_podman(content: bytes) -> Iterable[str]:
    """Read the output of ``podman pull``."""
    progress = PodmanProgress({_DIGEST: 100})
    return [str(progress.parse_output(content.decode("utf-8", "replace")))]


def read_kernel_arguments(content: bytes) -> Iterable[str]:
    """Read /proc/cmdline, and compute an edit."""
    text = content.decode("utf-8", "replace")
    found = deployment_change.split_arguments(text)
    half = len(found) // 2
    counts = deployment_change.count_machine_arguments(found[:half], found[half:], found, {})
    deployment_change.is_applied(found, deployment_change.compute_edit(counts, found[half:], found))
    return ()


def read_build_log(content: bytes) -> Iterable[str]:
    """Find the reason of a failed build in the output of buildah."""
    lines = content.decode("utf-8", "replace").split("\n")
    return [str(classify_failure(1, lines)), str(classify_failure(-9, lines))]


def read_dpkg(content: bytes) -> Iterable[str]:
    """Read the package database of an image."""
    return [str(each) for each in parse_dpkg_status(content)]


def read_rpm_header(content: bytes) -> Iterable[str]:
    """Read one header of an RPM database; its caller handles ValueError."""
    return [str(parse_header(content))]


def read_signature_policy(content: bytes) -> Iterable[str]:
    """Read policy.json of containers."""
    return [str(find_rule(content, _IMAGE)), str(find_storage_rule(content))]


def read_settings(content: bytes) -> Iterable[str]:
    """Read agent.toml."""
    given = parse_settings(content, where="agent.toml")
    return [str(merge_settings(given, PartialSettings()))]


def read_kubeconfig_file(content: bytes) -> Iterable[str]:
    """Read a kubeconfig."""
    path = make_directory() / "kubeconfig"
    path.write_bytes(content)
    found = read_kubeconfig(str(path))
    return [found.server, found.source]


def read_certificate(content: bytes) -> Iterable[str]:
    """Read the Node in a client certificate."""
    return [read_node_name(ApiServerConfig("https://a", certificate=content))]


def _list_certificates() -> Iterator[bytes]:
    authority = CertificateAuthority(make_directory())
    for user, groups in (("system:node:n1", ["system:nodes"]), ("a" * 64, ["b", "c"])):
        yield authority.make_client_identity(user, groups).certificate


def _list_bootc() -> Iterator[bytes]:
    entry, status = test_status.entry, test_status.status
    yield status(staged=entry(3), booted=entry(2), rollback=entry(1), otherDeployments=[entry(4)])
    yield status(booted=entry(2, softRebootCapable=True, downloadOnly=True), rollbackQueued=True)


def _list_bootc_progress() -> Iterator[bytes]:
    event: dict[str, Any] = {
        "type": "ProgressBytes", "task": "pulling", "description": "x", "bytes": 1, "bytesTotal": 9,
        "steps": 1, "stepsTotal": 3, "subtasks": [{"bytes": 2, "bytesTotal": 3}],
    }  # fmt: skip
    yield json.dumps(event).encode()
    yield b"\n".join(json.dumps({**event, "steps": each}).encode() for each in (0, 1, 2))
    yield json.dumps({"type": "ProgressSteps", "steps": 1, "stepsTotal": 2}).encode()
    yield b'{"type":"ProgressBytes","bytes":%s,"bytesTotal":3}' % (b"9" * 400)


def _list_rpm_ostree() -> Iterator[bytes]:
    deployment = {
        "id": "d", "checksum": "c" * 64, "version": "1", "booted": True, "staged": False,
        "container-image-reference": f"ostree-unverified-registry:{_IMAGE}",
        "container-image-reference-digest": _DIGEST,
        "requested-packages": ["a"], "requested-base-removals": ["b"], "origin": "o",
        "custom-origin": [f"pivot://{_IMAGE}", "x"],
        "base-commit-meta": {
            "ostree.container.image-config": '{"config": {"Labels": {"a": "b"}}}'
        },
    }  # fmt: skip
    document = {
        "Deployments": [deployment, {**deployment, "booted": False, "finalization-locked": True}],
        "ActiveTransaction": ["upgrade", ":1.1", "/"],
        "ActiveTransactionPath": "unix:path=/run/x",
        "signals": [
            ["Message", "hello"], ["TaskBegin", "[3/15] Fetching layer"], ["TaskEnd", "x"],
            ["PercentProgress", "Writing", 50],
        ],
        "error": "error: Packages not found: a",
    }  # fmt: skip
    yield json.dumps(document).encode()
    document["signals"] = [["TaskBegin", f"[1/{'9' * 5000}]"], ["PercentProgress", "x", 10**30]]
    yield json.dumps(document).encode()


def _list_skopeo() -> Iterator[bytes]:
    layers = [{"MIMEType": "x", "Digest": _DIGEST, "Size": 5}]
    yield json.dumps(
        {
            "Name": "a", "Architecture": "amd64", "Created": "2026-01-01T00:00:00.5Z",
            "Labels": {"a": "b"}, "LayersData": layers,
            "manifests": [{"digest": _DIGEST, "platform": {"os": "linux", "architecture": "x"}}],
        }
    ).encode()  # fmt: skip
    yield b'level=fatal msg="Error parsing image name: reading manifest: unauthorized: denied"'
    yield b"Get https://a/v2/: dial tcp: lookup a: no such host\ntoomanyrequests"
    yield b'{"Created": "0001-01-01T00:00:00Z"}'
    yield b'{"Created": "9999-12-31T23:59:59"}'


def _list_podman() -> Iterator[bytes]:
    yield f"Copying blob {_DIGEST}\nProgress: 1.5GiB / 2.0GiB\nCopying config x\n".encode()


def _list_kernel_arguments() -> Iterator[bytes]:
    yield b'BOOT_IMAGE=/vmlinuz root=UUID=1 quiet a="b c" quiet x=1 x=2\n'


def _list_build_logs() -> Iterator[bytes]:
    yield b'STEP 3/5: RUN make\nerror: no space left on device\nError: building at STEP "RUN make"'
    yield b"Error: reading manifest latest in r/a: unauthorized: access denied\n"


def _list_dpkg() -> Iterator[bytes]:
    yield (
        b"Package: a\nStatus: install ok installed\nVersion: 1:2-3\nArchitecture: amd64\n x\n\n" * 2
    )


def _list_rpm_headers() -> Iterator[bytes]:
    data = b"name\0version\0release\0" + b"\0\0\0\x01" + b"noarch\0"
    entries = ((1000, 6, 0), (1001, 6, 5), (1002, 6, 13), (1003, 4, 21), (1022, 6, 25))
    body = b"".join(
        b"".join(number.to_bytes(4, "big") for number in (*each, 1)) for each in entries
    )
    yield len(entries).to_bytes(4, "big") + len(data).to_bytes(4, "big") + body + data


def _list_policies() -> Iterator[bytes]:
    signed = {"type": "sigstoreSigned", "keyPath": "/etc/k", "signedIdentity": {"type": "x"}}
    yield json.dumps(
        {
            "default": [{"type": "reject"}],
            "transports": {
                "docker": {"quay.io/os": [signed], "": [{"type": "insecureAcceptAnything"}]},
                "containers-storage": {"": [{"type": "signedBy", "keyData": "a", "keyType": "b"}]},
            },
        }
    ).encode()


def _list_settings() -> Iterator[bytes]:
    yield (ROOT / "rpm" / "agent.toml").read_bytes()
    yield (
        b'drain = "never"\nbackend = "bootc"\nlog_level = "debug"\nnode_name = "a"\n'
        b'[limits]\nstage_s = 60\ncall_s = 1.5\n[health]\nmode = "enforce"\nretention_s = 5\n'
        b'[preflight]\nonly_warn = ["DiskFull"]\n[firstboot]\nimage = "a"\n'
        b'[drift]\ndefault = "block"\nrepairs_per_hour = 3\n[drift.paths]\n"/etc/*" = "repair"\n'
    )
    yield b"[drift]\nrepairs_per_hour = 0x" + b"f" * 3600 + b"\n"


def _list_kubeconfigs() -> Iterator[bytes]:
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://a.example.com:6443",
            "certificate-authority": "ca", "tls-server-name": "x",
            "insecure-skip-tls-verify": False}}],
        "users": [{"name": "u", "user": {"token": "abc", "client-certificate": "c",
            "client-key-data": "LS0tLS1CRUdJTiBY"}}],
    }  # fmt: skip
    yield json.dumps(document).encode()
    import yaml

    yield yaml.safe_dump(document).encode()
    yield b"current-context: !!int _\nclusters: !!float _\nusers: 2020-99-99\n"
    yield b"a: " + b"[" * 2000


TARGETS = (
    FuzzTarget("bootc-status", read_bootc_status, _list_bootc, Grammar.JSON),
    FuzzTarget("bootc-progress", read_bootc_progress, _list_bootc_progress, Grammar.JSON),
    FuzzTarget("rpm-ostree", read_rpm_ostree, _list_rpm_ostree, Grammar.JSON),
    FuzzTarget("skopeo", read_skopeo, _list_skopeo, Grammar.JSON),
    FuzzTarget("podman", read_podman, _list_podman, Grammar.LINES),
    FuzzTarget("kernel-arguments", read_kernel_arguments, _list_kernel_arguments),
    FuzzTarget("build-log", read_build_log, _list_build_logs, Grammar.LINES),
    FuzzTarget("dpkg", read_dpkg, _list_dpkg, Grammar.LINES),
    FuzzTarget("rpm-header", read_rpm_header, _list_rpm_headers, errors=(ValueError,)),
    FuzzTarget("signature-policy", read_signature_policy, _list_policies, Grammar.JSON),
    FuzzTarget("agent-toml", read_settings, _list_settings, Grammar.LINES),
    FuzzTarget("kubeconfig", read_kubeconfig_file, _list_kubeconfigs, Grammar.YAML),
    FuzzTarget("client-certificate", read_certificate, _list_certificates),
)
