"""Inspection with a fake skopeo: its arguments, output, exit code and errors."""

import json
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.clocks import SystemClock
from treenail.host.container.registry import SkopeoClient
from treenail.observations import ImageInspection, ImageLayer, InspectionProblem
from treenail.process import ProgramRunner

pytestmark = pytest.mark.process

IMAGE = "registry.example.com/os/node@sha256:" + "a" * 64
ANSWER = {
    "Name": "registry.example.com/os/node",
    "Digest": "sha256:" + "a" * 64,
    "Created": "2026-01-01T00:00:00.123456789Z",
    "Labels": {"ostree.bootable": "true"},
    "Architecture": "arm64",
    "Layers": ["sha256:1", "sha256:2"],
    "LayersData": [
        {"MIMEType": "x", "Digest": "sha256:1", "Size": 10, "Annotations": None},
        {"MIMEType": "x", "Digest": "sha256:2", "Size": -1},
    ],
}


def fails(message: str) -> str:
    return (
        f'cat >&2 <<\'END\'\ntime="2026-01-01T00:00:00Z" level=fatal msg="{message}"\nEND\nexit 1'
    )


def registry(directory: Path, script: str, *, limit_s: float = 10.0) -> SkopeoClient:
    tool = directory / "skopeo"
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {directory}/arguments\n{script}\n')
    tool.chmod(0o755)
    programs = ProgramRunner(SystemClock(), {"PATH": f"{directory}:/usr/bin:/bin"})
    return SkopeoClient(programs, FakeClock(), timeout_s=limit_s)


def test_inspect_image_returns_architecture_layers_and_labels(tmp_path: Path) -> None:
    found = registry(tmp_path, f"cat <<'END'\n{json.dumps(ANSWER)}\nEND").inspect_image(
        IMAGE, auth_file="/var/lib/treenail/auth.json"
    )
    assert found == ImageInspection(
        "arm64",
        1767225600.123456,
        (ImageLayer("sha256:1", 10), ImageLayer("sha256:2", 0)),
        {"ostree.bootable": "true"},
    )
    assert (tmp_path / "arguments").read_text().split() == [
        "inspect",
        "--no-tags",
        "--authfile",
        "/var/lib/treenail/auth.json",
        f"docker://{IMAGE}",
    ]


def test_inspect_image_without_pull_secret_passes_no_authfile(tmp_path: Path) -> None:
    assert registry(tmp_path, "echo '{}'").inspect_image(IMAGE) == ImageInspection("", None, (), {})
    assert "--authfile" not in (tmp_path / "arguments").read_text()


PINGING = "Error parsing image name: pinging container registry registry.example.com: Get"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RegistryNameUnknown", f"{PINGING}: dial tcp: lookup registry.example.com: no such host"),
        ("RegistryUnreachable", f"{PINGING}: dial tcp 192.0.2.1:443: connect: connection refused"),
        ("RegistryUnreachable", f"{PINGING}: dial tcp 192.0.2.1:443: connect: no route to host"),
        (
            "RegistryUntrusted",
            (
                f"{PINGING}: tls: failed to verify certificate: x509: certificate signed by "
                "unknown authority"
            ),
        ),
        (
            "RegistryCertificateExpired",
            (
                f"{PINGING}: x509: certificate has expired or is not yet valid: current time "
                "2026-01-01T00:00:00Z is after 2025-01-01T00:00:00Z"
            ),
        ),
        (
            "ClockBehindCertificate",
            (
                f"{PINGING}: x509: certificate has expired or is not yet valid: current time "
                "1970-01-01T00:00:00Z is before 2025-01-01T00:00:00Z"
            ),
        ),
        (
            "RegistryUnauthorized",
            (
                "Error parsing image name: reading manifest sha256:aa: unauthorized: "
                "authentication required"
            ),
        ),
        (
            "RegistryUnauthorized",
            "unable to retrieve auth token: invalid username/password: unauthorized: bad",
        ),
        (
            "RegistryForbidden",
            "reading manifest sha256:aa: denied: requested access to the resource is denied",
        ),
        ("RegistryForbidden", "StatusCode: 403, no body"),
        (
            "ImageNotFound",
            "reading manifest sha256:aa in registry.example.com/os: manifest unknown",
        ),
        ("RegistryTimeout", f"{PINGING}: dial tcp 192.0.2.1:443: i/o timeout"),
        ("RegistryTimeout", f"{PINGING}: net/http: TLS handshake timeout"),
        (
            "WrongArchitecture",
            "choosing image instance: no image found in image index for architecture amd64",
        ),
        (
            "RegistryFailed",
            "loading registries configuration: lstat /root/.config/containers: permission denied",
        ),
        ("RegistryFailed", "received unexpected HTTP status: 502 Bad Gateway"),
        (
            "RegistryFailed",
            (
                f"reading manifest sha256:{'403' * 21}a in registry.example.com/os: received "
                "unexpected HTTP status: 500 Internal Server Error"
            ),
        ),
        (
            "RegistryFailed",
            (
                "pinging container registry denied.example.com: reading manifest in "
                "unauthorized.example.com/denied/os-denied: StatusCode: 500, no body"
            ),
        ),
        ("RegistryFailed", "creating temporary file: open /var/tmp/x: permission denied"),
        (
            "RegistryUnreachable",
            f"{PINGING}: dial tcp 192.0.2.1:443: connect: permission denied",
        ),
        ("RegistryForbidden", "reading manifest sha256:aa: denied: permission denied"),
        ("RegistryForbidden", "invalid status code from registry 403 (Forbidden)"),
        ("RegistryForbidden", "received unexpected HTTP status: 403 Forbidden"),
    ],
)
def test_inspect_image_failure_has_kind_and_end_of_message(
    tmp_path: Path, kind: str, message: str
) -> None:
    found = registry(tmp_path, fails(message)).inspect_image(IMAGE)
    assert isinstance(found, InspectionProblem)
    assert found.kind == kind
    assert found.text.endswith(message[-40:])


def test_inspect_image_failure_withholds_credentials(tmp_path: Path) -> None:
    message = "Get https://puller:hunter2@registry.example.com/v2/: connection refused"
    found = registry(tmp_path, fails(message)).inspect_image(IMAGE)
    assert isinstance(found, InspectionProblem)
    assert "hunter2" not in found.text


def test_inspect_image_of_silent_registry_times_out(tmp_path: Path) -> None:
    found = registry(tmp_path, "exec sleep 600", limit_s=0.2).inspect_image(IMAGE)
    assert found == InspectionProblem("RegistryTimeout", "skopeo did not exit within 0.2 s")


def test_inspect_image_without_skopeo_returns_none(tmp_path: Path) -> None:
    nowhere = ProgramRunner(SystemClock(), {"PATH": str(tmp_path)})
    assert SkopeoClient(nowhere, FakeClock(), timeout_s=1.0).inspect_image(IMAGE) is None


@pytest.mark.parametrize(
    ("message", "attempts"),
    [
        (f"{PINGING}: dial tcp 192.0.2.1:443: connect: connection refused", 3),
        ("received unexpected HTTP status: 503 Service Unavailable", 3),
        ("toomanyrequests: You have reached your pull rate limit", 3),
        ("reading manifest sha256:aa: manifest unknown", 1),
        (f"{PINGING}: dial tcp 192.0.2.1:443: i/o timeout", 1),
    ],
)
def test_inspect_image_retries_outages_only(tmp_path: Path, message: str, attempts: int) -> None:
    script = f'echo >> "{tmp_path}/attempts"\n{fails(message)}'
    assert isinstance(registry(tmp_path, script).inspect_image(IMAGE), InspectionProblem)
    assert (tmp_path / "attempts").read_text().count("\n") == attempts


def test_inspect_image_after_outage_returns_image(tmp_path: Path) -> None:
    answer = f"cat <<'END'\n{json.dumps(ANSWER)}\nEND"
    outage = fails("dial tcp 192.0.2.1:443: connect: connection refused")
    script = f'[ -e "{tmp_path}/up" ] || {{ touch "{tmp_path}/up"\n{outage}\n}}\n{answer}'
    assert isinstance(registry(tmp_path, script).inspect_image(IMAGE), ImageInspection)


def test_inspect_image_rejects_output_without_json(tmp_path: Path) -> None:
    found = registry(tmp_path, "echo nonsense").inspect_image(IMAGE)
    assert found == InspectionProblem(
        "RegistryFailed",
        "cannot inspect the image: skopeo printed 'nonsense', not a JSON object",
    )
