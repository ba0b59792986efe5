"""Debian's Ignition 2.14 as the client of the server, up to the files of the machine.

`TREENAIL_TEST_IGNITION` names programs of other releases, with `:` between them.
"""

import json
import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.provisioning.samples import NEW, make_config, make_file
from tests.provisioning.serving import OneToken, Serving, serve
from treenail.config import node_paths
from treenail.provisioning.content.document import build_pointer
from treenail.provisioning.tokens.tokens import AccessVerdict
from treenail_lab.machine.ignition import ignition
from treenail_lab.machine.ignition.ignition import CONFIG_CACHE, Ignition, find_cause
from treenail_lab.machine.rootfs import VENDOR

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(ignition.find_refusal()), reason=ignition.find_refusal() or "none"),
]
OTHERS = [Path(each) for each in os.environ.get("TREENAIL_TEST_IGNITION", "").split(":") if each]
PROGRAMS = (ignition.PROGRAM, *OTHERS)
TOKEN = "tn_abc_canary-of-the-token"  # of this test
KUBECONFIG = b"the bootstrap kubeconfig"
UNIT = "[Service]\nExecStart=/usr/bin/true\n[Install]\nWantedBy=multi-user.target\n"


class BusyAccess(OneToken):
    """Answers 503 to the first requests."""

    def __init__(self, token: str, refusals: int) -> None:
        super().__init__(token, KUBECONFIG)
        self._refusals = refusals

    def check(self, token: str, pool: str, address: str) -> AccessVerdict:
        self._refusals -= 1
        if self._refusals >= 0:
            return AccessVerdict(HTTPStatus.SERVICE_UNAVAILABLE, "the API server is unreachable")
        return super().check(token, pool, address)


@pytest.fixture
def access() -> OneToken:
    return OneToken(TOKEN, KUBECONFIG)


@pytest.fixture
def serving(tmp_path: Path, access: OneToken) -> Iterator[Serving]:
    with serve(tmp_path, access=access) as serving:
        yield serving


def new_machine(
    serving: Serving,
    token: str = TOKEN,
    version: str = "3.1.0",
    program: Path = ignition.PROGRAM,
) -> Ignition:
    """A machine with a pointer config as user data."""
    root = find_root(serving)
    for directory in ("etc", VENDOR):
        (root / directory).mkdir(parents=True)
    found = Ignition(root.parent, root, server_port=serving.server.port, program=program)
    pointer = build_pointer(
        f"https://localhost:{serving.server.port}",
        "worker",
        version,
        authorities=serving.authority.pem,
        token=token,
    )
    found.write_pointer_config(json.dumps(pointer).encode())
    return found


def find_root(serving: Serving) -> Path:
    return serving.sources.parent / "machine/root"


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("program", PROGRAMS)
def test_ignition_writes_the_config_of_the_pool(
    serving: Serving, access: OneToken, program: Path
) -> None:
    unit = {"name": "worker.service", "enabled": True, "contents": UNIT}
    config = make_config(
        NEW, make_file("/etc/motd", "welcome", mode=0o640), systemd={"units": [unit]}
    )
    serving.write("config", config)
    machine = new_machine(serving, program=program)
    machine.provision()
    root = find_root(serving)
    motd = root / "etc/motd"
    assert (motd.read_text(), mode_of(motd)) == ("welcome", 0o640)
    assert (root / "etc/systemd/system/worker.service").read_text() == UNIT
    assert (root / "etc/systemd/system/multi-user.target.wants/worker.service").is_symlink()
    kubeconfig = root / node_paths.KUBECONFIG[1:]
    assert (kubeconfig.read_bytes(), mode_of(kubeconfig)) == (KUBECONFIG, 0o600)
    served = root / node_paths.SERVED_CONFIG[1:]
    assert json.loads(served.read_text())["spec"] == config["spec"]
    assert mode_of(served) == 0o600
    annotations = json.loads((root / node_paths.FIRST_BOOT_ANNOTATIONS[1:]).read_text())
    assert annotations["machineconfiguration.openshift.io/currentConfig"] == NEW
    encapsulated = json.loads((root / node_paths.ENCAPSULATED_CONFIG[1:]).read_text())
    assert encapsulated["metadata"]["name"] == NEW
    assert encapsulated["spec"]["kernelArguments"] == ["quiet"]
    (version,) = {row.version for row in serving.requests.rows}
    assert version == "3.3.0" if program == ignition.PROGRAM else version > "3.3.0"
    assert encapsulated["spec"]["config"] == {"ignition": {"version": version}}
    assert len(access.uses) == len(serving.requests.rows) >= 1


@pytest.mark.parametrize(
    ("version", "program"),
    [
        *(("3.0.0", program) for program in PROGRAMS),
        *(("3.3.0", program) for program in PROGRAMS),
        *((version, program) for version in ("3.4.0", "3.5.0") for program in OTHERS),
    ],
)
def test_ignition_sends_the_token_of_each_version(
    serving: Serving, access: OneToken, version: str, program: Path
) -> None:
    machine = new_machine(serving, version=version, program=program)
    result = machine.run_fetch()
    if "unsupported config version" in result.log:
        pytest.skip(f"{program.name} does not read {version}")
    assert result.code == 0
    assert access.uses


@pytest.mark.parametrize("token", ["", "tn_abc_wrong"])
def test_ignition_without_the_token_gives_up_without_a_byte(serving: Serving, token: str) -> None:
    serving.write("config", make_config(NEW, make_file("/etc/motd", "canary-of-the-config")))
    result = new_machine(serving, token).run_fetch()
    assert result.code != 0
    assert find_cause(result.log) == "failed to fetch resource"
    assert [row.status for row in serving.requests.rows] == [HTTPStatus.UNAUTHORIZED]
    assert [each for each in find_root(serving).rglob("*") if each.is_file()] == [
        find_root(serving) / ignition.USER_DATA
    ]


def test_ignition_requests_again_after_503(tmp_path: Path) -> None:
    access = BusyAccess(TOKEN, refusals=2)
    with serve(tmp_path, access=access) as serving:
        assert new_machine(serving).run_fetch().code == 0
        assert [row.status for row in serving.requests.rows][:3] == [503, 503, 200]


def test_ignition_leaves_the_token_in_its_cache_and_user_data(serving: Serving) -> None:
    """The agent removes both at the first boot: Ignition 2.14 leaves them."""
    new_machine(serving).provision()
    root = find_root(serving)
    found = [each for each in root.rglob("*") if each.is_file() and TOKEN in each.read_text()]
    assert sorted(found) == [root / ignition.USER_DATA, root / CONFIG_CACHE]


def test_ignition_that_fails_prints_the_token(serving: Serving) -> None:
    """The manual says so. The lab names the cause only."""
    serving.write("config", make_config(NEW, make_file("/etc/motd")))
    machine = new_machine(serving)
    (find_root(serving) / "etc/motd/x").mkdir(parents=True)
    assert machine.run_fetch().code == 0
    result = machine.run_files()
    assert result.code != 0
    assert TOKEN in result.log
    assert TOKEN not in find_cause(result.log)
    assert "/etc/motd" in find_cause(result.log)
    assert TOKEN not in repr(result)
