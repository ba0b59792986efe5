"""The life of a transaction: its socket, its peers, and who may leave when."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gi.repository import GLib

from tests.lab.machine.client import (
    TRANSACTION,
    Peer,
    RpmOstreeClient,
    error_name,
    run,
    variants,
    wait_until,
)
from treenail_lab.images import make_image
from treenail_lab.machine.bus.objects import BUSY
from treenail_lab.machine.node.daemons import RpmOstreeHost
from treenail_lab.machine.settings import MachineSettings

pytestmark = pytest.mark.integration

A = make_image("os/node", "41.1", 1_000_000)
B = make_image("os/node", "41.2", 4_000_000)
C = make_image("os/node", "41.3", 4_000_000)
QUICK = MachineSettings(pull_bytes_per_s=40e6, staging_s=0.02)
SLOW = replace(QUICK, pull_bytes_per_s=0.2e6)


@pytest.fixture
def host(directory: Path) -> Iterator[RpmOstreeHost]:
    with RpmOstreeHost(directory, booted=A, images=(B, C), settings=QUICK) as running:
        yield running


@pytest.fixture
def client(host: RpmOstreeHost) -> Iterator[RpmOstreeClient]:
    with RpmOstreeClient(host.address) as connected:
        yield connected


def idle(client: RpmOstreeClient) -> bool:
    return bool(client.shown()["ActiveTransaction"] == ("", "", ""))


def test_transaction_before_start_does_nothing(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    with Peer(client.rebase(B.pull_spec)) as peer:
        assert client.deployments()[0]["version"] == "41.1"
        assert peer.heard == []
        assert peer.start()
        assert peer.result() == (True, "")


def test_peer_has_no_bus_and_answers_no_hello(client: RpmOstreeClient) -> None:
    hello = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello")
    with Peer(client.rebase(B.pull_spec)) as peer:
        with pytest.raises(GLib.Error) as refused:
            peer.call(hello)
        assert error_name(refused.value) == "org.freedesktop.DBus.Error.UnknownMethod"


def test_progress_is_that_of_a_container_import(client: RpmOstreeClient) -> None:
    with Peer(client.rebase(B.pull_spec)) as peer:
        peer.start()
        peer.result()
    refspec = f"ostree-unverified-registry:{B.pull_spec}"
    names = [f"sha256:{layer.digest[7:19]}" for layer in B.layers]
    begun = [values[0] for name, values in peer.heard if name == "TaskBegin"]
    messages = [values[0] for name, values in peer.heard if name == "Message"]
    assert messages[:4] == [
        f"Pulling manifest: {refspec}",
        f"Importing: {refspec} (digest: {B.digest})",
        "ostree chunk layers needed: 3 (3.0\N{NO-BREAK SPACE}MB)",
        "custom layers needed: 1 (1.0\N{NO-BREAK SPACE}MB)",
    ]
    assert begun[0] == f"[1/4] Fetching ostree chunk {names[0]} (1.0\N{NO-BREAK SPACE}MB)"
    assert begun[3] == f"[4/4] Fetching layer {names[3]} (1.0\N{NO-BREAK SPACE}MB)"
    assert [name for name, _ in peer.heard].count("TaskEnd") == len(begun)
    assert peer.heard[-1] == ("Finished", (True, ""))


def test_active_transaction_is_published_while_it_exists(client: RpmOstreeClient) -> None:
    address = client.rebase(B.pull_spec)
    shown = client.shown()
    me = client.connection.get_unique_name()
    os_path = "/org/projectatomic/rpmostree1/fedora_coreos"
    assert shown["ActiveTransaction"] == ("Rebase", me, os_path)
    assert shown["ActiveTransactionPath"] == address
    with Peer(address) as peer:
        titles = peer.call(
            (None, "/", "org.freedesktop.DBus.Properties", "GetAll"), "(s)", TRANSACTION
        )
    assert titles[0]["Title"] == f"rebase ostree-unverified-registry:{B.pull_spec}"


def test_transaction_socket_is_accessible_to_all_users(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    client.rebase(B.pull_spec)
    socket = host.root / "run/rpm-ostree-transaction.sock"
    assert socket.stat().st_mode & 0o777 == 0o666


def test_same_call_joins_and_only_the_first_start_counts(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(SLOW)
    address = client.rebase(B.pull_spec)
    with Peer(address) as first, RpmOstreeClient(host.address) as other:
        assert first.start()
        assert other.rebase(B.pull_spec) == address
        with Peer(address) as second:
            assert not second.start()
            host.change_settings(QUICK)
            first.cancel()
            assert first.result() == second.result() == (False, "Operation was cancelled")


def test_other_call_during_transaction_is_busy(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(SLOW)
    with Peer(client.rebase(B.pull_spec)) as peer:
        peer.start()
        with pytest.raises(GLib.Error, match="Transaction in progress: rebase") as refused:
            client.rebase(C.pull_spec)
        assert error_name(refused.value) == BUSY
        with pytest.raises(GLib.Error, match="Transaction in progress"):
            client.os("Cleanup", "(as)", ["pending-deploy"])


def test_initiator_gone_before_start_ends_transaction(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    with RpmOstreeClient(host.address) as initiator:
        initiator.rebase(B.pull_spec)
        assert not idle(client)
    wait_until(lambda: idle(client))
    assert run(client.rebase(C.pull_spec)) == (True, "")


def test_initiator_gone_after_start_does_not_end_transaction(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    with RpmOstreeClient(host.address) as initiator:
        peer = Peer(initiator.rebase(B.pull_spec))
        peer.start()
        peer.close()
    wait_until(lambda: idle(client))
    assert client.deployments()[0]["version"] == "41.2"


def test_transaction_lives_until_every_peer_has_closed(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    address = client.rebase(B.pull_spec)
    with Peer(address) as lingering:
        assert run(address) == (True, "")
        with pytest.raises(GLib.Error, match="Transaction in progress"):
            client.rebase(C.pull_spec)
        assert lingering.result() == (True, "")
    wait_until(lambda: idle(client))


def test_peer_that_never_closes_is_disconnected(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(replace(QUICK, force_close_s=0.1))
    with Peer(client.rebase(B.pull_spec)) as peer:
        peer.start()
        peer.result()
        wait_until(peer.connection.is_closed)
    assert idle(client)


def test_late_start_gets_finished_again_alone(client: RpmOstreeClient) -> None:
    address = client.rebase(B.pull_spec)
    with Peer(address) as first:
        first.start()
        first.result()
        with Peer(address) as late:
            assert not late.start()
            assert late.result() == (True, "")
        assert [name for name, _ in first.heard].count("Finished") == 1


def test_cancel_stops_pull_and_keeps_imported_layers(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(replace(QUICK, pull_bytes_per_s=4e6))
    with Peer(client.rebase(B.pull_spec)) as peer:
        peer.start()
        wait_until(lambda: ("TaskEnd", ("done",)) in peer.heard)
        peer.cancel()
        assert peer.result() == (False, "Operation was cancelled")
    host.change_settings(QUICK)
    with Peer(client.rebase(B.pull_spec)) as again:
        again.start()
        assert again.result() == (True, "")
    messages = [values[0] for name, values in again.heard if name == "Message"]
    assert any("already present" in text for text in messages)


def test_cancel_before_start_cancels_at_start(client: RpmOstreeClient) -> None:
    with Peer(client.rebase(B.pull_spec)) as peer:
        peer.cancel()
        peer.start()
        assert peer.result() == (False, "Operation was cancelled")


def test_properties_follow_later_than_finished_unless_reloaded(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    host.change_settings(replace(QUICK, properties_lag_s=60))
    assert run(client.rebase(B.pull_spec)) == (True, "")
    assert client.shown()["Deployments"][0]["version"] == "41.1"
    client.sysroot("Reload")
    assert client.shown()["Deployments"][0]["version"] == "41.2"


def test_new_deployments_emit_properties_changed(client: RpmOstreeClient) -> None:
    changes = client.listen(interface="org.freedesktop.DBus.Properties")
    run(client.rebase(B.pull_spec))
    wait_until(lambda: any("Deployments" in values[1] for _, values in changes))


def test_dead_initiator_of_finished_transaction_is_cleaned_up(
    host: RpmOstreeHost, client: RpmOstreeClient
) -> None:
    with RpmOstreeClient(host.address) as initiator:
        assert run(initiator.rebase(B.pull_spec)) == (True, "")
    wait_until(lambda: idle(client))
    (address,) = client.os("RefreshMd", "(a{sv})", variants(force=("b", True)))
    assert run(address) == (True, "")
