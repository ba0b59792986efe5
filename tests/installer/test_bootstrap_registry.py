"""The bootstrap registry: real docker-registry, skopeo and containers-image."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.installer.registries import (
    CLOCK,
    LIMIT,
    LOOPBACK,
    make_registry,
    needs_skopeo,
    open_client,
    run_skopeo,
    write_auth_file,
    write_certificates,
)
from tests.registry.images import push_image
from tests.registry.real_registry import needs_docker_registry
from tests.waiting import wait_until
from treenail.errors import HostError
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail.installer.bootstrap.registry_process import find_registry_program, make_command
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_state import reset_installation
from treenail.registry.client import RegistryClient
from treenail.registry.errors import LoginRefused, RegistryError, Unsupported
from treenail.registry.transport import TlsSettings
from treenail.registry.uploads import upload_bytes

pytestmark = [pytest.mark.process, needs_docker_registry]
FINAL = "registry.example.invalid/os/node"
MIRROR = """\
[[registry]]
prefix = "{final}"
location = "{final}"

[[registry.mirror]]
location = "{address}/os/node"
pull-from-mirror = "digest-only"
"""


def push_node_image(registry: BootstrapRegistry, tag: str = "1") -> str:
    """Push a small image; return its digest."""
    with open_client(registry, is_push=True) as client:
        return push_image(client, "os/node", tag).digest


@needs_skopeo
def test_pull_by_digest_through_mirror_succeeds_and_by_tag_fails(tmp_path: Path) -> None:
    with make_registry(tmp_path) as registry:
        digest = push_node_image(registry)
        config = tmp_path / "registries.conf"
        config.write_text(MIRROR.format(final=FINAL, address=registry.address))
        auth = write_auth_file(tmp_path / "auth.json", registry.address, registry.pull_login)
        options = [
            f"--registries-conf={config}", "copy", f"--src-authfile={auth}",
            f"--src-cert-dir={write_certificates(tmp_path / 'certs', registry)}",
        ]  # fmt: skip
        done = run_skopeo(*options, f"docker://{FINAL}@{digest}", f"dir:{tmp_path}/copy")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "copy/manifest.json").exists()
        refused = run_skopeo(*options, f"docker://{FINAL}:1", f"dir:{tmp_path}/tagged")
    assert refused.returncode != 0
    assert "registry.example.invalid" in refused.stderr
    assert registry.address not in refused.stderr


@needs_skopeo
@pytest.mark.parametrize("login", ["push", "pull"])
def test_push_to_public_port_is_refused_with_each_login(tmp_path: Path, login: str) -> None:
    layout = f"dir:{tmp_path}/image"
    with make_registry(tmp_path) as registry:
        digest = push_node_image(registry)
        certificates = write_certificates(tmp_path / "certs", registry)
        pull = write_auth_file(tmp_path / "pull.json", registry.address, registry.pull_login)
        source = f"docker://{registry.address}/os/node@{digest}"
        done = run_skopeo(
            "copy", f"--src-authfile={pull}", f"--src-cert-dir={certificates}", source, layout
        )
        assert done.returncode == 0, done.stderr
        chosen = registry.push_login if login == "push" else registry.pull_login
        auth = write_auth_file(tmp_path / "auth.json", registry.address, chosen)
        target = f"docker://{registry.address}/os/other:1"
        refused = run_skopeo(
            "copy", f"--dest-authfile={auth}", f"--dest-cert-dir={certificates}", layout, target
        )
    assert refused.returncode != 0
    expected = {"push": "unauthorized", "pull": "StatusCode: 405"}[login]
    assert expected in refused.stderr


def test_push_with_pull_login_is_refused(tmp_path: Path) -> None:
    with make_registry(tmp_path) as registry:
        with open_client(registry, is_push=False) as client, pytest.raises(Unsupported):
            upload_bytes(client, "os/node", "application/octet-stream", b"x")
        wrong = RegistryClient(
            registry.push_address,
            CLOCK,
            login=registry.pull_login,
            tls=TlsSettings(ca_pem=registry.ca_pem),
        )
        with closing(wrong), pytest.raises(LoginRefused):
            upload_bytes(wrong, "os/node", "application/octet-stream", b"x")


def test_restart_keeps_blobs_logins_and_certificates(tmp_path: Path) -> None:
    with make_registry(tmp_path) as registry:
        digest = push_node_image(registry)
        before = (registry.pull_login, registry.push_login, registry.ca_pem)
        certificate = (tmp_path / ".treenail/registry/server.crt").read_bytes()
    with make_registry(tmp_path) as registry:
        assert (registry.pull_login, registry.push_login, registry.ca_pem) == before
        assert (tmp_path / ".treenail/registry/server.crt").read_bytes() == certificate
        with open_client(registry, is_push=False) as client:
            assert client.get_manifest("os/node", digest).digest == digest


def test_ipv6_address_is_refused_before_a_machine_gets_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="accept no IPv6 address") as caught:
        make_registry(tmp_path, host="fd00::1").__enter__()
    assert "--host NAME --host fd00::1" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["[::1]", "[::]"])
def test_registry_listens_on_an_ipv6_address(tmp_path: Path, address: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with make_registry(tmp_path, listen=f"{address}:0") as registry:
        port = int(registry.address.rpartition(":")[2])
        socket.create_connection(("::1", port), 5).close()


def test_port_in_use_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(HostError) as caught,
            make_registry(tmp_path, listen=f"{LOOPBACK}:{port}"),
        ):
            pass
    assert str(caught.value) == (
        f"cannot start the bootstrap registry: another program listens on {LOOPBACK}:{port}"
    )
    assert f"ss -ltnp 'sport = :{port}'" in caught.value.remedy


@pytest.mark.parametrize("index", [0, 1])
def test_killed_process_is_started_again(tmp_path: Path, index: int) -> None:
    with make_registry(tmp_path) as registry:
        digest = push_node_image(registry)
        killed = registry.pids[index]
        assert killed is not None
        os.kill(killed, signal.SIGKILL)

        def has_image() -> bool:
            if registry.pids[index] == killed:
                return False
            try:
                with open_client(registry, is_push=bool(index)) as client:
                    return client.head_manifest("os/node", digest) is not None
            except RegistryError:
                return False

        wait_until(has_image, limit_s=20.0)


def test_kill_of_installation_ends_both_processes(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path\n"
        "from tests.installer.registries import make_registry\n"
        f"with make_registry(Path({str(tmp_path)!r})) as registry:\n"
        "    print(*registry.pids, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))
    with make_registry(tmp_path) as registry:
        push_node_image(registry)


def test_program_that_ends_without_closing_the_registry_ends_it(tmp_path: Path) -> None:
    """A signal may end the program between the start of the registry and its registration."""
    text = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.installer.registries import make_registry\n"
        "registry = make_registry(Path(sys.argv[1]))\n"
        "registry.__enter__()\n"
        "print(*registry.pids, flush=True)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", text, tmp_path],
        capture_output=True, text=True, env=environ, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def test_process_that_survived_a_kill_is_ended(tmp_path: Path) -> None:
    """A kill between fork and prctl leaves a process without a death signal, and no record."""
    with make_registry(tmp_path) as registry:
        pids = registry.pids
        (config,) = tmp_path.rglob("pull.json")
        program = find_registry_program(shutil.which)
        command = make_command(program, config, directory=config.parent, name="")
    assert None not in pids
    survivor = subprocess.Popen(
        command, env={"PATH": os.environ["PATH"]}, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port = json.loads(config.read_text())["http"]["addr"].rpartition(":")[2]
        wait_until(lambda: can_connect(int(port)))
        with make_registry(tmp_path, listen=f"{LOOPBACK}:{port}") as registry:
            push_node_image(registry)
        assert survivor.wait(10.0) == -signal.SIGKILL
    finally:
        survivor.kill()
        survivor.wait()


def can_connect(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex((LOOPBACK, port)) == 0


def test_full_storage_refuses_pushes_and_pulls_continue(tmp_path: Path) -> None:
    with make_registry(tmp_path) as registry:
        digest = push_node_image(registry)
        (registry.storage / "more").write_bytes(b"")
        os.truncate(registry.storage / "more", LIMIT + 1)
        problem = wait_until(registry.find_problem, limit_s=20.0)
        assert "above its limit of 64 MiB" in problem
        wait_until(lambda: registry.pids[1] is None)
        with open_client(registry, is_push=False) as client:
            assert client.head_manifest("os/node", digest) is not None
        (registry.storage / "more").unlink()
        wait_until(lambda: registry.pids[1] is not None, limit_s=20.0)
    with (
        pytest.raises(HostError, match="and the storage limit of"),
        make_registry(tmp_path, storage_limit=1 << 60),
    ):
        pass


def test_logs_have_address_and_time_and_no_file_or_argument_has_a_password(
    tmp_path: Path,
) -> None:
    with make_registry(tmp_path) as registry:
        push_node_image(registry)
        with open_client(registry, is_push=False) as client:
            client.head_manifest("os/node", "1")
        secrets = {
            secret
            for login in (registry.push_login, registry.pull_login)
            for secret in login.list_secrets()
        }
        arguments = [Path(f"/proc/{pid}/cmdline").read_text() for pid in registry.pids]
    logs = InstallDirectory(tmp_path).logs
    shown = (logs / "registry-pull.log").read_text()
    assert '"HEAD /v2/os/node/manifests/1 HTTP/1.1" 200' in shown
    assert f"{LOOPBACK} - - [" in shown
    assert not [secret for secret in secrets for text in (*arguments, shown) if secret in text]
    private = tmp_path / ".treenail"
    files = [each for each in private.rglob("*") if each.is_file()]
    readable = [
        each.name
        for each in files
        if stat.S_IMODE(each.stat().st_mode) & 0o077 and "storage" not in each.parts
    ]
    assert not readable
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_host_without_registry_program_is_refused_with_packages() -> None:
    with pytest.raises(HostError) as caught:
        find_registry_program(lambda _: None)
    assert "apt-get install docker-registry" in caught.value.remedy
    assert "dnf install docker-distribution" in caught.value.remedy


def test_address_that_machines_have_stays(tmp_path: Path) -> None:
    with make_registry(tmp_path) as registry:
        registry.record_address()
        address = registry.address
    host, _, port = address.partition(":")
    with make_registry(tmp_path) as registry:
        assert registry.address == address
    with closing(socket.create_server((LOOPBACK, 0))) as free:
        other = free.getsockname()[1]
    with pytest.raises(HostError) as caught, make_registry(tmp_path, listen=f"{LOOPBACK}:{other}"):
        pass
    assert f"machines of this installation may have {address}" in str(caught.value)
    assert f"--host {host} --registry-listen :{port}" in caught.value.remedy
    with pytest.raises(HostError), make_registry(tmp_path, host="localhost"):
        pass
    # As the remedy says.
    reset_installation(InstallDirectory(tmp_path), InstallFiles(), with_images=False)
    with make_registry(tmp_path, host="localhost") as registry:
        assert registry.address.startswith("localhost:")
