"""The log bundle has every part of an installation, and no secret."""

import base64
import gzip
import io
import json
import os
import stat
import time
from pathlib import Path

import pytest

from tests.fixtures import canaries
from tests.fixtures.files import read_parts, write_files, write_programs
from tests.installer.log_bundle.bundles import (
    CANARY,
    DIGEST,
    NOW,
    find_traces,
    make_archive,
    make_install_directory,
)
from treenail.cli.controller.main import main
from treenail.clocks import SystemClock
from treenail.config.node_paths import WITHHELD
from treenail.config.redact import format_redacted_ends
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.log_bundle.cluster_parts import parse_node_address
from treenail.installer.log_bundle.gather import INDEX_NAME, GatherSettings, gather_bundle
from treenail.log_bundle import LogBundle
from treenail.process import ProgramRunner

PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\n" + "c2VjcmV0\n" * 40 + "-----END PRIVATE KEY-----\n"


def gather(
    root: Path, environ: dict[str, str], *nodes: str, node_timeout_s: float = 20.0
) -> tuple[bytes, tuple[str, ...]]:
    """Gather; return the archive and the hosts that sent nothing."""
    stream = io.BytesIO()
    clock = SystemClock()
    bundle = LogBundle(stream, name="log-bundle-1", now=NOW, index_name=INDEX_NAME)
    settings = GatherSettings(tuple(map(parse_node_address, nodes)), node_timeout_s)
    silent = gather_bundle(
        bundle, InstallDirectory(root), settings, ProgramRunner(clock, environ), clock
    )
    return stream.getvalue(), tuple(each.host for each in silent)


@pytest.mark.process
def test_gather_failed_installation_has_every_part_and_no_secret(tmp_path: Path) -> None:
    root = make_install_directory(tmp_path / "cluster")
    environ = write_programs(
        tmp_path / "bin", journalctl=f'echo "$*"; echo "pull: password={CANARY}"'
    )
    packed, silent = gather(root, environ)
    assert silent == ()
    assert find_traces(packed) == []
    parts = read_parts(packed)
    prefix = "bootstrap/treenail"
    attempt = f"{prefix}/logs/builds/master/attempt-2"
    manifests = f"{prefix}/registry/manifests/example/os/{DIGEST[:12]}"
    assert set(parts) == {
        f"{prefix}/index.json",
        f"{prefix}/summary.txt",
        f"{prefix}/install.json",
        f"{prefix}/status.json",
        f"{prefix}/host.json",
        f"{prefix}/files.json",
        f"{prefix}/journal/treenail-bootstrap.service",
        f"{prefix}/manifests/list.yaml",
        f"{prefix}/manifests/mosc.yaml",
        f"{prefix}/manifests/secret.yaml",
        f"{prefix}/machine-pools/master.yaml",
        f"{prefix}/machine-configs/rendered-master-1.yaml",
        f"{prefix}/controller-config/machine-config-controller.yaml",
        f"{prefix}/cluster-objects/secret-handover.yaml",
        f"{manifests}.json",
        f"{manifests}-config.json",
        f"{attempt}/Containerfile",
        f"{attempt}/output.log",
        f"{attempt}/report.json",
        f"{prefix}/logs/registry.log",
    }
    index = json.loads(parts[INDEX_NAME])
    assert set(index["missing"]) == {f"{prefix}/manifests/broken.yaml"}
    assert b"RUN true" in parts[f"{attempt}/Containerfile"]
    assert b"name: push" in parts[f"{prefix}/manifests/mosc.yaml"]
    listed = {each["path"] for each in json.loads(parts[f"{prefix}/files.json"])}
    assert {"auth/kubeconfig", ".treenail/registry/secrets/push-login"} <= listed


@pytest.mark.process
def test_gather_shows_no_secret_in_any_form(tmp_path: Path) -> None:
    """Programs, builds, objects and nodes show every secret in every form."""
    root, printed = tmp_path / "cluster", canaries.format_journal()
    files = canaries.make_secret_files()
    pull = base64.b64encode(files["config.json"].encode()).decode()
    secret = {"kind": "Secret", "metadata": {"name": "pull"}, "data": {".dockerconfigjson": pull}}
    event = {"kind": "Event", "metadata": {"name": "x", "annotations": {"a": printed}}}
    write_files(
        root,
        {
            "treenail-install.yaml": files["proxy.env"],
            "manifests/pull.yaml": json.dumps(secret),
            "manifests/event.yaml": json.dumps({**event, "message": printed}),
            ".treenail/registry/secrets/logins.json": files["logins.json"],
            ".treenail/install.json": json.dumps({"id": "0123456789ab", "reason": printed}),
            ".treenail/status.json": json.dumps({"failure": {"reason": printed}}),
            ".treenail/cluster-objects/build.yaml": json.dumps({**event, "reason": printed}),
            ".treenail/logs/registry.log": canaries.format_journal("time=now msg: "),
            ".treenail/logs/builds/master/attempt-1/output.log": printed,
        },
    )
    journal = tmp_path / "journal"
    journal.write_text(canaries.format_journal("Nov 21 10:11:12.000 host podman[12]: "))
    node = tmp_path / "node.tar.gz"
    node.write_bytes(
        make_archive(
            {
                "status.json": json.dumps({"reason": printed}).encode(),
                "journal/treenail.service": journal.read_bytes(),
            }
        )
    )
    environ = write_programs(tmp_path / "bin", journalctl=f"cat {journal}", ssh=f"cat {node}")
    packed, silent = gather(root, environ, "192.0.2.1")
    assert silent == ()
    content = gzip.decompress(packed)
    assert b"control-plane/192.0.2.1/treenail/journal/treenail.service" in content
    assert b"shown: the next step begins" in content
    assert canaries.find_leaks(content) == []


@pytest.mark.process
def test_summary_of_failed_step_has_reason_remedy_and_newest_log(tmp_path: Path) -> None:
    root = make_install_directory(tmp_path / "cluster")
    newest = root / ".treenail/logs/builds/master/attempt-2/output.log"
    os.utime(newest, (time.time() + 60, time.time() + 60))
    packed, _ = gather(root, write_programs(tmp_path / "bin"))
    summary = read_parts(packed)["bootstrap/treenail/summary.txt"].decode()
    assert "Installation 0123456789ab" in summary
    assert "failed   build:master (2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z; attempt 2)" in (
        summary
    )
    reason = f"cannot push https://{WITHHELD}@registry.example/os: denied"
    assert f"Step build:master failed: {reason}" in summary
    assert "  remedy: correct the Secret push" in summary
    assert summary.split("Newest logs:\n")[1].startswith(
        "  bootstrap/treenail/logs/builds/master/attempt-2/output.log\n"
    )
    assert "journal/treenail-bootstrap.service: journalctl failed with exit code 1" in summary


@pytest.mark.process
@pytest.mark.parametrize(
    "damage",
    [
        {".treenail/install.json": '{"id": "0123", "steps": [{"name": '},
        {".treenail/install.json": "[]", "machine-configs": "a file"},
        {".treenail/install.json": '{"id": 7}', ".treenail/logs": "a file"},
        {".treenail/install.json": '{"id": "x", "steps": [7, {"name": []}]}'},
        {"manifests/deep.yaml": "[" * 5000, "manifests/bomb.yaml": "a: &a [*a]\n"},
        {".treenail/images/master/oci-layout": "{}", ".treenail/images/master/index.json": "{"},
    ],
)
def test_gather_damaged_directory_writes_bundle(tmp_path: Path, damage: dict[str, str]) -> None:
    root = tmp_path / "cluster"
    write_files(root, damage)
    packed, _ = gather(root, write_programs(tmp_path / "bin"))
    parts = read_parts(packed)
    assert {INDEX_NAME, "bootstrap/treenail/summary.txt"} <= set(parts)


@pytest.mark.process
def test_gather_links_and_special_files_are_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write_files(outside, {"a.log": "outside", "b.yaml": "kind: Outside\n"})
    root = tmp_path / "cluster"
    (root / ".treenail/logs").mkdir(parents=True)
    (root / "machine-configs").symlink_to(outside)
    (root / ".treenail/logs/link.log").symlink_to(outside / "a.log")
    (root / ".treenail/status.json").symlink_to(outside / "a.log")
    os.mkfifo(root / ".treenail/logs/pipe.log")
    os.mkfifo(root / ".treenail/install.json")
    packed, _ = gather(root, write_programs(tmp_path / "bin"))
    assert not any(
        b"utside" in content
        for name, content in read_parts(packed).items()
        if name.startswith("bootstrap/treenail/logs")
    )
    assert json.loads(read_parts(packed)[INDEX_NAME])["missing"].keys() >= {
        "bootstrap/treenail/install.json",
        "bootstrap/treenail/status.json",
    }


@pytest.mark.process
def test_gather_long_log_keeps_both_ends_and_states_truncation(tmp_path: Path) -> None:
    root = tmp_path / "cluster"
    lines = [f"line {number:060}" for number in range(80_000)]
    # A key that begins before the tail and ends inside it.
    text = "\n".join(lines[:30_000]) + "\n" + PRIVATE_KEY + "\n".join(lines[30_000:])
    write_files(root, {".treenail/logs/registry.log": text})
    packed, _ = gather(root, write_programs(tmp_path / "bin"))
    parts = read_parts(packed)
    name = "bootstrap/treenail/logs/registry.log"
    shown = parts[name].decode()
    assert shown.startswith(lines[0])
    assert shown.endswith(lines[-1])
    assert len(shown) < 4 * 1024 * 1024
    assert "bytes left out" in shown
    assert "c2VjcmV0" not in shown
    assert "left out" in json.loads(parts[INDEX_NAME])["truncated"][name]


def test_tail_that_begins_inside_a_private_key_withholds_it() -> None:
    head, rest = b"begin\n", PRIVATE_KEY.encode() + b"end"
    shown = format_redacted_ends(head, rest, overlap=100, omitted=1000)
    assert b"c2VjcmV0" not in shown
    assert shown.startswith("begin\n… 1100 bytes left out\n".encode())
    assert shown.endswith(b"end")


def test_bundle_at_its_limit_leaves_out_parts_and_names_them() -> None:
    stream = io.BytesIO()
    bundle = LogBundle(stream, name="x", now=NOW, index_name=INDEX_NAME, max_bytes=10_000_000)
    bundle.add_part("first", lambda: os.urandom(1_000_000))
    bundle.add_part("second", lambda: os.urandom(1_000_000))
    bundle.add_part("zeros", lambda: b"\0" * 3_000_000)
    bundle.close()
    packed = stream.getvalue()
    assert len(packed) < 10_000_000
    parts = read_parts(packed)
    assert set(parts) == {"first", "zeros", INDEX_NAME}
    missing = json.loads(parts[INDEX_NAME])["missing"]
    assert missing == {"second": "left out: the bundle would have more than 10 MB"}


@pytest.mark.process
def test_nodes_are_read_over_ssh_and_silent_ones_are_named(tmp_path: Path) -> None:
    archive = make_archive(
        {
            "status.json": json.dumps({"phase": "staging", "token": CANARY}).encode(),
            "journal/treenail.service": f"password: {CANARY}\nstaged\n".encode(),
            "../../escape": b"x",
            "index.json": b"{}",
        }
    )
    (tmp_path / "archive").write_bytes(archive)
    environ = write_programs(
        tmp_path / "bin",
        ssh=f"""\
for each; do case "$each" in
192.0.2.1) exec cat {tmp_path}/archive;;
192.0.2.2) echo "No route to host" >&2; exit 255;;
192.0.2.3) exec sleep 60;;
192.0.2.4) echo garbage; exit 0;;
192.0.2.5) case "$*" in *journalctl*) echo booting; exit;; esac; exit 127;;
esac; done""",
    )
    nodes = [f"192.0.2.{number}" for number in range(1, 6)]
    begin = time.monotonic()
    packed, silent = gather(tmp_path, environ, *nodes, node_timeout_s=3.0)
    assert time.monotonic() - begin < 15
    assert find_traces(packed) == []
    parts = read_parts(packed)
    nodes_of = {name for name in parts if name.startswith("control-plane/")}
    assert nodes_of == {
        "control-plane/192.0.2.1/treenail/status.json",
        "control-plane/192.0.2.1/treenail/journal/treenail.service",
        "control-plane/192.0.2.1/treenail/index.json",
        "control-plane/192.0.2.5/treenail/journal/all",
    }
    assert silent == ("192.0.2.2", "192.0.2.3", "192.0.2.4")
    missing = json.loads(parts[INDEX_NAME])["missing"]
    reasons = {number: missing[f"control-plane/192.0.2.{number}/treenail"] for number in (2, 3, 4)}
    assert "No route to host" in reasons[2]
    assert "did not exit within 3 s" in reasons[3]
    assert "is damaged" in reasons[4]
    assert "192.0.2.3" in parts["bootstrap/treenail/summary.txt"].decode()


@pytest.mark.parametrize("address", ["-oProxyCommand=x", "a b", "", "x@-y", "core@", "a;b", "$(x)"])
def test_node_address_that_is_no_address_is_refused(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["install", "gather", "--dir", str(tmp_path), f"--node={address}"])
    assert code == 64
    assert "cannot use the node address" in capsys.readouterr().err


@pytest.mark.process
def test_gather_command_writes_private_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_install_directory(tmp_path / "cluster")
    path = tmp_path / "x.tar.gz"
    command = ["install", "gather", "--dir", str(root), "-o", str(path)]
    assert main(command) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_traces(path.read_bytes()) == []
    output = capsys.readouterr().out
    assert f"{path}: " in output
    assert "missing bootstrap/treenail/manifests/broken.yaml" in output
    assert main(command) == 1
    assert "the file exists" in capsys.readouterr().err
