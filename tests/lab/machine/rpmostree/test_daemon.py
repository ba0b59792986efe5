"""Transactions of rpm-ostreed change the deployments or fail with its errors."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.lab.machine.client import (
    OS,
    RPM_OSTREE,
    RpmOstreeClient,
    error_name,
    run,
    variants,
    wait_until,
)
from treenail.host.filesystem.root_directory import Root
from treenail.host.ostree.sysroot import is_staged_locked
from treenail_lab.images import Credential, make_image
from treenail_lab.machine.bus.objects import FAILED
from treenail_lab.machine.node.daemons import RpmOstreeHost
from treenail_lab.machine.ostree.sysroot import make_deployment
from treenail_lab.machine.rpmostree.daemon import build_object_path
from treenail_lab.machine.settings import DISK_FULL, MachineSettings

pytestmark = pytest.mark.integration

SECRET = Credential("node", "s3cret")
A = make_image("os/node", "41.1", 1_000_000)
B = make_image("os/node", "41.2", 2_000_000)
CLOSED = make_image("os/node", "41.3", 2_000_000, registry="r.example", credential=SECRET)
CORRUPT = make_image("os/node", "41.4", 2_000_000, faults={"pull": "corrupt layer"})
QUICK = MachineSettings(pull_bytes_per_s=100e6, staging_s=0.02)


@pytest.fixture
def host(directory: Path) -> Iterator[RpmOstreeHost]:
    with RpmOstreeHost(directory, booted=A, images=(B, CLOSED, CORRUPT), settings=QUICK) as running:
        yield running


@pytest.fixture
def client(host: RpmOstreeHost) -> Iterator[RpmOstreeClient]:
    with RpmOstreeClient(host.address) as connected:
        yield connected


def versions(client: RpmOstreeClient) -> list[str]:
    return [str(deployment["version"]) for deployment in client.deployments()]


def kernel_arguments(client: RpmOstreeClient, *, pending: bool) -> str:
    (config,) = client.os("GetDeploymentBootConfig", "(sb)", "", pending)
    return str(config["options"])


def test_os_object_shows_booted_default_and_rollback(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    run(client.rebase(B.pull_spec, locked=False))
    host.reboot()
    with RpmOstreeClient(host.address) as after:
        shown = after.properties(RPM_OSTREE, OS, f"{RPM_OSTREE}.OS")
    assert shown["BootedDeployment"]["version"] == "41.2"
    assert shown["DefaultDeployment"]["version"] == "41.2"
    assert shown["RollbackDeployment"]["version"] == "41.1"
    assert (shown["Name"], shown["CachedUpdate"]) == ("fedora-coreos", {})


def test_os_name_is_escaped_in_object_path() -> None:
    assert build_object_path("a-b/c.d") == "/org/projectatomic/rpmostree1/a_b_c_2Ed"


def test_empty_os_name_is_the_booted_one(client: RpmOstreeClient) -> None:
    assert client.sysroot("GetOS", "(s)", "") == (OS,)


def test_locked_deployment_has_no_key_for_its_lock(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    run(client.rebase(B.pull_spec))
    assert is_staged_locked(Root(host.root))
    # As the real one with libostree 2023.8 and later, which no longer writes the file it looks for.
    assert "finalization-locked" not in client.deployments()[0]


def test_option_of_wrong_type_or_name_is_ignored(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    refspec = f"ostree-unverified-registry:{B.pull_spec}"
    options = variants(lock_finalization=("i", 1), reboot=("i", 1), live=("b", True))
    (address,) = client.os("Rebase", "(a{sv}sas)", options, refspec, [])
    assert run(address) == (True, "")
    assert not is_staged_locked(Root(host.root))


def test_same_refspec_as_the_pending_deployment_is_an_error(client: RpmOstreeClient) -> None:
    run(client.rebase(B.pull_spec))
    success, text = run(client.rebase(B.pull_spec))
    assert (success, text) == (
        False,
        f"Old and new refs are equal: ostree-unverified-registry:{B.pull_spec}",
    )


def test_rebase_to_booted_refspec_while_another_is_staged_works(client: RpmOstreeClient) -> None:
    run(client.rebase(B.pull_spec))
    assert run(client.rebase(A.pull_spec)) == (True, "")
    assert versions(client) == ["41.1", "41.1"]
    assert client.deployments()[0]["serial"] == 1


def test_update_deployment_is_rebase_with_modifiers(client: RpmOstreeClient) -> None:
    refspec = f"ostree-unverified-registry:{B.pull_spec}"
    modifiers = variants(set_refspec=("s", refspec))
    options = variants(
        lock_finalization=("b", True), custom_origin=("(ss)", ("url", "managed by a test"))
    )
    (address,) = client.os("UpdateDeployment", "(a{sv}a{sv})", modifiers, options)
    assert run(address) == (True, "")
    assert client.deployments()[0]["custom-origin"] == ("url", "managed by a test")


def test_deploy_takes_a_digest_of_the_same_repository(client: RpmOstreeClient) -> None:
    (address,) = client.os("Deploy", "(sa{sv})", B.digest, {})
    assert run(address) == (True, "")
    assert versions(client) == ["41.2", "41.1"]


def test_digest_has_no_upgrade(client: RpmOstreeClient) -> None:
    (address,) = client.os("Upgrade", "(a{sv})", {})
    assert run(address) == (True, "")
    assert versions(client) == ["41.1"]


def test_credential_is_read_at_each_pull(host: RpmOstreeHost, client: RpmOstreeClient) -> None:
    run(client.rebase(CLOSED.pull_spec))
    auth = base64.b64encode(b"node:s3cret").decode()
    (host.root / "run/ostree/auth.json").write_text(
        json.dumps({"auths": {"r.example": {"auth": auth}}})
    )
    assert run(client.rebase(CLOSED.pull_spec)) == (True, "")


def test_unknown_digest_is_manifest_unknown(client: RpmOstreeClient) -> None:
    unknown = B.pull_spec.replace(B.digest[-8:], "0" * 8)
    success, text = run(client.rebase(unknown.replace("registry.lab", "other.lab")))
    assert not success
    assert text.endswith("in other.lab.example/os/node: manifest unknown")


def test_faults_of_the_machine_and_of_an_image_end_the_transaction(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    assert run(client.rebase(CORRUPT.pull_spec)) == (False, "Importing: corrupt layer")
    host.change_settings(replace(QUICK, staging_error=DISK_FULL))
    assert run(client.rebase(B.pull_spec)) == (False, DISK_FULL)
    host.change_settings(QUICK)
    assert run(client.rebase(B.pull_spec)) == (True, "")


def test_kernel_arguments_derive_from_existing_ones_of_caller(
    client: RpmOstreeClient,
) -> None:
    existing = kernel_arguments(client, pending=True)
    (address,) = client.os("KernelArgs", "(sasasasa{sv})", existing, ["nosmt"], [], ["rw"], {})
    assert run(address) == (True, "")
    changed = kernel_arguments(client, pending=True)
    assert "nosmt" in changed.split()
    assert "rw" not in changed.split()
    # A caller with an old string takes back what others changed.
    (address,) = client.os("KernelArgs", "(sasasasa{sv})", existing, ["quiet"], [], [], {})
    assert run(address) == (True, "")
    assert "nosmt" not in kernel_arguments(client, pending=True).split()
    assert kernel_arguments(client, pending=False) == existing


def test_boot_config_of_a_staged_deployment_has_only_its_options(client: RpmOstreeClient) -> None:
    run(client.rebase(B.pull_spec))
    (first,) = client.os("GetDeploymentBootConfig", "(sb)", "0", False)
    assert (sorted(first), first["staged"]) == (["options", "staged"], True)


def test_existing_arguments_change_nothing(client: RpmOstreeClient) -> None:
    options = variants(append_if_missing=("as", ["rw"]), delete_if_present=("as", ["nosmt"]))
    existing = kernel_arguments(client, pending=True)
    (address,) = client.os("KernelArgs", "(sasasasa{sv})", existing, [], [], [], options)
    assert run(address) == (True, "")
    assert versions(client) == ["41.1"]


def test_later_change_without_lock_unlocks(host: RpmOstreeHost, client: RpmOstreeClient) -> None:
    run(client.rebase(B.pull_spec, locked=True))
    existing = kernel_arguments(client, pending=True)
    (address,) = client.os("KernelArgs", "(sasasasa{sv})", existing, ["nosmt"], [], [], {})
    assert run(address) == (True, "")
    assert not host.sysroot.is_staged_locked()


def test_cleanup_of_the_rollback_leaves_the_booted(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    run(client.rebase(B.pull_spec, locked=False))
    host.reboot()
    with RpmOstreeClient(host.address) as after:
        (address,) = after.os("Cleanup", "(as)", ["rollback-deploy"])
        assert run(address) == (True, "")
        assert versions(after) == ["41.2"]


def test_unknown_element_of_cleanup_is_an_error_of_the_call(client: RpmOstreeClient) -> None:
    with pytest.raises(GLib.Error, match="Invalid cleanup type: everything") as refused:
        client.os("Cleanup", "(as)", ["everything"])
    assert error_name(refused.value) == FAILED


def test_skip_purge_without_another_refspec_is_refused(client: RpmOstreeClient) -> None:
    options = variants(skip_purge=("b", True), no_pull_base=("b", True))
    asked = variants(install_packages=("as", ["tmux"]))
    (address,) = client.os("UpdateDeployment", "(a{sv}a{sv})", asked, options)
    assert run(address) == (False, "Can't specify skip-purge if not setting a new refspec")


def change_packages(client: RpmOstreeClient, **modifiers: list[str]) -> tuple[bool, str]:
    options = variants(no_pull_base=("b", True), idempotent_layering=("b", True))
    asked = variants(**{key: ("as", names) for key, names in modifiers.items()})
    (address,) = client.os("UpdateDeployment", "(a{sv}a{sv})", asked, options)
    return run(address)


def test_layered_packages_make_local_commit(client: RpmOstreeClient) -> None:
    assert change_packages(client, install_packages=["usbguard"]) == (True, "")
    assert change_packages(client, override_remove_packages=["kernel"]) == (True, "")
    staged = client.deployments()[0]
    assert (staged["requested-packages"], staged["requested-base-removals"]) == (
        ["usbguard"],
        ["kernel"],
    )
    assert staged["base-checksum"] == A.commit
    assert staged["checksum"] != A.commit
    back = {"uninstall_packages": ["usbguard"], "override_reset_packages": ["kernel"]}
    assert change_packages(client, **back) == (True, "")
    assert client.deployments()[0]["checksum"] == A.commit


def test_packages_stay_when_the_image_changes(client: RpmOstreeClient) -> None:
    change_packages(client, install_packages=["usbguard"])
    run(client.rebase(B.pull_spec, locked=False))
    staged = client.deployments()[0]
    assert (staged["requested-packages"], staged["base-checksum"]) == (["usbguard"], B.commit)


def test_package_in_no_repository_is_not_found(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(replace(QUICK, missing_packages=("strace",)))
    assert change_packages(client, install_packages=["strace"]) == (
        False,
        "Packages not found: strace",
    )


def test_deployment_staged_by_another_program_is_published(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    client.sysroot("Reload")
    foreign = make_deployment(B, f"ostree-unverified-registry:{B.pull_spec}", ("rw",))
    host.sysroot.stage_deployment(foreign, locked=False)
    wait_until(lambda: len(client.shown()["Deployments"]) == 2)


def test_idle_daemon_exits_unless_client_is_registered(directory: Path) -> None:
    settings = replace(QUICK, idle_exit_s=0.2)
    bus = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
    with (
        RpmOstreeHost(directory, booted=A, settings=settings) as host,
        RpmOstreeClient(host.address) as client,
    ):
        client.sysroot("RegisterClient", "(a{sv})", variants(id=("s", "test")))
        whom = (*bus, "GetConnectionUnixProcessID")
        (before,) = client.call(whom, "(s)", RPM_OSTREE)
        client.sysroot("UnregisterClient", "(a{sv})", {})
        wait_until(lambda: not client.call((*bus, "NameHasOwner"), "(s)", RPM_OSTREE)[0])
        # The next call starts it again.
        assert client.shown()["Booted"] == OS
        (after,) = client.call(whom, "(s)", RPM_OSTREE)
        assert after != before
