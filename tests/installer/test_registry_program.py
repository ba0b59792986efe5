"""Which program runs the bootstrap registry, and with which command and configuration."""

import json
from pathlib import Path

from treenail.installer.bootstrap.registry_process import (
    DEFAULT_IMAGE,
    RegistryProcessConfig,
    find_registry_program,
    format_config,
    is_own_command,
    make_cleanup,
    make_command,
)

ROOT = Path("/srv/cluster/.treenail/registry")
CONFIG_FILE = ROOT / "pull.json"


def make_config(*, is_readonly: bool) -> RegistryProcessConfig:
    return RegistryProcessConfig(
        name="pull",
        host="::",
        port=22625,
        storage=ROOT / "storage",
        htpasswd=ROOT / "pull.htpasswd",
        certificate=ROOT / "server.crt",
        key=ROOT / "server.key",
        upload_key="upload-key",
        is_readonly=is_readonly,
    )


def test_program_of_the_host_is_used_before_podman() -> None:
    found = find_registry_program(lambda name: f"/usr/bin/{name}")
    assert make_command(found, CONFIG_FILE, directory=ROOT, name="x") == [
        "/usr/bin/docker-registry", "serve", str(CONFIG_FILE),
    ]  # fmt: skip
    assert make_cleanup(found, "x") == []


def test_podman_runs_the_image_and_removes_a_container_that_outlived_it() -> None:
    found = find_registry_program(lambda name: "/usr/bin/podman" if name == "podman" else None)
    command = make_command(found, CONFIG_FILE, directory=ROOT, name="treenail-registry-pull")
    assert command[:2] == ["/usr/bin/podman", "run"]
    assert command[-3:] == [DEFAULT_IMAGE, "serve", str(CONFIG_FILE)]
    assert f"--volume={ROOT}:{ROOT}" in command
    assert make_cleanup(found, "treenail-registry-pull") == [
        "/usr/bin/podman", "rm", "--force", "--ignore", "treenail-registry-pull",
    ]  # fmt: skip


def test_only_the_process_for_pushes_writes_and_purges() -> None:
    pull = json.loads(format_config(make_config(is_readonly=True)))
    push = json.loads(format_config(make_config(is_readonly=False)))
    assert pull["storage"]["maintenance"]["readonly"]["enabled"]
    assert not pull["storage"]["maintenance"]["uploadpurging"]["enabled"]
    assert not push["storage"]["maintenance"]["readonly"]["enabled"]
    assert push["storage"]["maintenance"]["uploadpurging"]["enabled"]
    assert pull["http"]["addr"] == "[::]:22625"
    assert not pull["log"]["accesslog"]["disabled"]


def test_process_of_another_configuration_is_not_ended() -> None:
    words = ["docker-registry", "serve", str(CONFIG_FILE)]
    assert is_own_command(words, CONFIG_FILE)
    assert not is_own_command(words, ROOT / "push.json")
    assert not is_own_command([], CONFIG_FILE)
