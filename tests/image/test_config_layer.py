"""The config layer: its content, what it omits, and that the agent accepts the tree."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests import unit_sets
from treenail.api.machineconfig import MachineConfig
from treenail.config import wanted_state
from treenail.config.image_content import compare_with_image
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.configuration.image_content import read_image_content
from treenail.host.filesystem.root_directory import Root
from treenail.image.config_layer import (
    CURRENT_CONFIG,
    PRESETS,
    ConfigLayer,
    compute_unit_links,
    make_config_layer,
)
from treenail.units.unit_files import FileChange, SymbolicLink

CANARY = "canary-4711"
UNIT_TEXT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"


def make_file(path: str, text: str = "text", **fields: object) -> dict[str, object]:
    return {"path": path, "contents": {"source": f"data:,{text}"}, **fields}


def make_config(
    *,
    files: list[dict[str, object]] | None = None,
    directories: list[dict[str, object]] | None = None,
    links: list[dict[str, object]] | None = None,
    units: list[dict[str, object]] | None = None,
    passwd: dict[str, object] | None = None,
) -> MachineConfig:
    ignition = {
        "ignition": {"version": "3.4.0"},
        "storage": {
            "files": files or [],
            "directories": directories or [],
            "links": links or [],
        },
        "systemd": {"units": units or []},
        "passwd": passwd or {},
    }
    return MachineConfig.from_json(
        {
            "metadata": {"name": "rendered-worker-a", "uid": "1", "resourceVersion": "7"},
            "spec": {"config": ignition, "osImageURL": "quay.io/os@sha256:" + "a" * 64},
        }
    )


def list_entries(layer: ConfigLayer) -> dict[str, tarfile.TarInfo]:
    tree = io.BytesIO(gzip.decompress(layer.tar_gz))
    with tarfile.open(fileobj=tree) as archive:
        return {f"/{entry.name}": entry for entry in archive.getmembers()}


def read_entry(layer: ConfigLayer, path: str) -> bytes:
    tree = io.BytesIO(gzip.decompress(layer.tar_gz))
    with tarfile.open(fileobj=tree) as archive:
        file = archive.extractfile(path.removeprefix("/"))
        return file.read()


def extract(layer: ConfigLayer, tree: Path) -> None:
    """Put the layer on a tree as an image's import does: /etc becomes /usr/etc."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(layer.tar_gz))) as archive:
        for entry in archive.getmembers():
            name = entry.name
            place = tree / (f"usr/{name}" if name.startswith("etc/") else name)
            if place.name.startswith(".wh."):
                place.with_name(place.name.removeprefix(".wh.")).unlink(missing_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if entry.isdir():
                place.mkdir(exist_ok=True)
                os.chown(place, entry.uid, entry.gid)
                place.chmod(entry.mode)
                continue
            place.unlink(missing_ok=True)
            if entry.issym():
                place.symlink_to(entry.linkname)
                continue
            content = archive.extractfile(entry)
            place.write_bytes(content.read())
            os.chown(place, entry.uid, entry.gid)
            place.chmod(entry.mode)


FIXED_DIFF_ID = "sha256:1e09863003775ddc155316296109f97c94ee41864b7f1b731589779f949cc4ad"
FIXED_DIGEST = "sha256:233357935818a85adf0f226b75c43b4698e5dd0fba33a4dec98c031d6deb3b8c"

FULL = make_config(
    files=[
        make_file("/etc/app.conf", mode=0o640),
        make_file("/etc/own.conf", user={"id": 12}, group={"id": 34}),
        make_file("/usr/share/app/data"),
        make_file("/etc/deep/er/file"),
        make_file("/etc/" + "long-" * 30 + "/" + "name-" * 20),
        make_file("/var/lib/app"),
        make_file("/home/core/app"),
        make_file("/usr/local/bin/tool"),
        make_file("/opt/app"),
        make_file("/etc/named.conf", user={"name": "named"}),
        make_file("/etc/kubernetes/kubeconfig", CANARY),
        make_file("/etc/mco/internal-registry-pull-secret.json", CANARY),
        make_file("/var/lib/kubelet/config.json", CANARY),
        make_file("/etc/kubernetes/kubelet-ca.crt", "rotated-ca"),
    ],
    directories=[{"path": "/etc/app.d", "mode": 0o1770, "user": {"id": 5}}],
    links=[
        {"path": "/etc/link", "target": "app.conf"},
        {"path": "/etc/hard", "target": "/etc/app.conf", "hard": True},
    ],
    units=[
        {"name": "app.service", "enabled": True, "contents": UNIT_TEXT},
        {"name": "off.service", "enabled": False, "contents": UNIT_TEXT},
        {"name": "masked.service", "mask": True},
        {"name": "base.service", "enabled": True},
        {"name": "worker@.service", "contents": UNIT_TEXT},
        {"name": "worker@one.service", "enabled": True},
        {
            "name": "kubelet.service",
            "dropins": [{"name": "10-a.conf", "contents": "[Unit]\n"}, {"name": "20-b.conf"}],
        },
    ],
    passwd={"users": [{"name": "core", "passwordHash": f"$6${CANARY}"}]},
)


def test_equal_configs_give_equal_bytes() -> None:
    layer = make_config_layer(FULL)
    shuffled = FULL.to_json()
    shuffled = json.loads(json.dumps(shuffled, sort_keys=True))
    random.Random(1).shuffle(shuffled["spec"]["config"]["storage"]["files"])
    again = make_config_layer(MachineConfig.from_json(shuffled))
    assert list_entries(again).keys() == list_entries(layer).keys()
    other = FULL.to_json()
    other["metadata"] = {"name": "rendered-worker-a", "uid": "2", "creationTimestamp": "now"}
    assert make_config_layer(MachineConfig.from_json(other)) == layer
    assert layer.digest == f"sha256:{hashlib.sha256(layer.tar_gz).hexdigest()}"
    tree = gzip.decompress(layer.tar_gz)
    assert layer.diff_id == f"sha256:{hashlib.sha256(tree).hexdigest()}"


def test_layer_of_a_fixed_config_has_a_fixed_digest() -> None:
    # A new digest moves every node to a new image: it must not change with a library.
    layer = make_config_layer(make_config(files=[make_file("/etc/app.conf")]))
    assert layer.diff_id == FIXED_DIFF_ID
    assert layer.digest == FIXED_DIGEST


def test_entries_have_the_modes_owners_and_targets_of_the_config() -> None:
    entries = list_entries(make_config_layer(FULL))
    found = {
        path: (entry.type, entry.mode, entry.uid, entry.gid, entry.linkname)
        for path, entry in entries.items()
    }
    file, link, directory = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    assert found["/etc/app.conf"] == (file, 0o640, 0, 0, "")
    assert found["/etc/own.conf"] == (file, 0o644, 12, 34, "")
    assert found["/etc/app.d"] == (directory, 0o1770, 5, 0, "")
    assert found["/etc/link"] == (link, 0o777, 0, 0, "app.conf")
    assert found["/etc/hard"] == (file, 0o640, 0, 0, "")
    wants = "/etc/systemd/system/multi-user.target.wants"
    assert found[f"{wants}/app.service"][-1] == "/etc/systemd/system/app.service"
    assert found[f"{wants}/worker@one.service"][-1] == "/etc/systemd/system/worker@.service"
    assert found["/etc/systemd/system/masked.service"][-1] == "/dev/null"
    assert f"{wants}/off.service" not in found
    assert "/etc/systemd/system/kubelet.service.d/.wh.20-b.conf" in found
    assert found[CURRENT_CONFIG][:2] == (file, 0o600)
    assert {entry.mtime for entry in entries.values()} == {0}
    # The mode of a directory of the base must not change.
    assert "/etc" not in found
    assert "/etc/deep/er" not in found


def test_omissions_are_named_with_their_reason() -> None:
    layer = make_config_layer(FULL)
    assert layer.problems == ()
    assert dict(each.split(": ", 1) for each in layer.omitted) == {
        "/var/lib/app": "no image carries it, the agent writes it",
        "/home/core/app": "no image carries it, the agent writes it",
        "/usr/local/bin/tool": "its directory is a link into /var on many systems",
        "/opt/app": "its directory is a link into /var on many systems",
        "/etc/named.conf": "its owner is a name, which the agent translates",
        "/etc/kubernetes/kubeconfig": "the agent writes logins and certificates",
        "/etc/mco/internal-registry-pull-secret.json": "the agent writes logins and certificates",
        "/var/lib/kubelet/config.json": "the agent writes logins and certificates",
        "/etc/kubernetes/kubelet-ca.crt": "the agent writes logins and certificates",
        "base.service": "the agent enables or disables units of the base",
    }
    assert not {each.partition(": ")[0] for each in layer.omitted} & {*list_entries(layer)}


def test_layer_and_its_config_contain_no_login() -> None:
    layer = make_config_layer(FULL)
    assert CANARY.encode() not in gzip.decompress(layer.tar_gz)
    current = json.loads(read_entry(layer, CURRENT_CONFIG))
    paths = [each["path"] for each in current["spec"]["config"]["storage"]["files"]]
    assert "/etc/app.conf" in paths
    assert "/var/lib/app" not in paths
    assert current["metadata"] == {"name": "rendered-worker-a"}
    assert current["spec"]["config"]["passwd"]["users"] == [{"name": "core"}]
    assert FULL.to_json()["spec"]["config"]["passwd"]["users"][0]["passwordHash"]


def test_presets_keep_the_enablement_in_a_first_boot() -> None:
    lines = read_entry(make_config_layer(FULL), PRESETS).decode().splitlines()
    assert lines == [
        "enable worker@.service one",
        "enable app.service",
        "enable base.service",
        "disable off.service",
        "enable worker@one.service",
    ]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemctl") is None, reason="no systemctl here")
@pytest.mark.parametrize("default", [None, True, False])
def test_links_are_those_that_a_first_boot_makes(tmp_path: Path, default: bool | None) -> None:
    template = f"{UNIT_TEXT}DefaultInstance=one\n"
    wanted = wanted_state.WantedState(
        units={
            "a.service": wanted_state.WantedUnit("a.service", UNIT_TEXT, enabled=True),
            "b.service": wanted_state.WantedUnit("b.service", UNIT_TEXT, enabled=False),
            "p@.service": wanted_state.WantedUnit("p@.service", template, enabled=default),
            "p@two.service": wanted_state.WantedUnit("p@two.service", enabled=True),
            "p@no.service": wanted_state.WantedUnit("p@no.service", enabled=False),
        }
    )
    links = compute_unit_links(wanted)
    files: dict[str, FileChange] = {
        path: text.encode() for path, text in wanted.list_unit_files().items()
    }
    files |= {path: SymbolicLink(target) for path, target in links.made.items()}
    files[PRESETS] = "\n".join((*links.presets, "")).encode()
    files["/usr/lib/systemd/system-preset/99-default.preset"] = b"disable *\n"
    unit_sets.write_files(tmp_path, files)
    command = ["systemctl", f"--root={tmp_path}", "preset-all"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    assert unit_sets.read_links(tmp_path) == links.made


def test_trust_bundle_is_an_anchor() -> None:
    layer = make_config_layer(make_config(), trust_bundle=b"certificates")
    anchor = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
    assert read_entry(layer, anchor) == b"certificates"
    assert layer != make_config_layer(make_config())


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        (
            make_config(files=[make_file("/usr/share/a", user={"name": "app"})]),
            "/usr/share/a",
            "its owner is a name",
        ),
        (
            make_config(links=[{"path": "/etc/a", "target": "/etc/passwd", "hard": True}]),
            "/etc/a",
            "hard link to /etc/passwd",
        ),
        (
            make_config(units=[{"name": "a@.service", "enabled": True, "contents": UNIT_TEXT}]),
            "a@.service",
            "template without DefaultInstance",
        ),
        (
            make_config(
                units=[
                    {
                        "name": "a.service",
                        "enabled": True,
                        "contents": "[Install]\nWantedBy=%H.target\n",
                    }
                ]
            ),
            "a.service",
            "only a running systemd knows %H",
        ),
    ],
)
def test_problem_of_neither_image_nor_agent_is_found(
    config: MachineConfig, path: str, why: str
) -> None:
    (problem,) = make_config_layer(config).problems
    assert problem.path == path
    assert why in problem.why


def test_aliases_and_also_make_links() -> None:
    first = (
        "[Install]\nWantedBy=a.target b.target\nAlias=other.service\nAlso=second.socket base.path\n"
    )
    second = "[Install]\nRequiredBy=sockets.target\n"
    layer = make_config_layer(
        make_config(
            units=[
                {"name": "first.service", "enabled": True, "contents": first},
                {"name": "second.socket", "contents": second},
            ]
        )
    )
    links = {path: entry.linkname for path, entry in list_entries(layer).items() if entry.issym()}
    directory = "/etc/systemd/system"
    assert links == {
        f"{directory}/other.service": f"{directory}/first.service",
        f"{directory}/a.target.wants/first.service": f"{directory}/first.service",
        f"{directory}/b.target.wants/first.service": f"{directory}/first.service",
        f"{directory}/sockets.target.requires/second.socket": f"{directory}/second.socket",
    }
    assert layer.omitted == ("base.path: the agent enables or disables units of the base",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can set the owners of the layer")
def test_agent_accepts_the_base_with_the_layer(tmp_path: Path) -> None:
    base = tmp_path / "usr/lib/systemd/system"
    base.mkdir(parents=True)
    for name in ("base.service", "kubelet.service"):
        (base / name).write_text(UNIT_TEXT)
    dropins = tmp_path / "usr/etc/systemd/system/kubelet.service.d"
    dropins.mkdir(parents=True)
    (dropins / "20-b.conf").write_text("[Unit]\n")
    (tmp_path / "usr/local").symlink_to("../var/usrlocal")
    (tmp_path / "opt").symlink_to("var/opt")
    wanted = read_wanted_state(FULL)
    before = compare_with_image(
        wanted, read_image_content(Root(tmp_path, has_usr_etc=True), wanted)
    )
    assert before.missing
    layer = make_config_layer(FULL)
    extract(layer, tmp_path)
    split = compare_with_image(wanted, read_image_content(Root(tmp_path, has_usr_etc=True), wanted))
    assert split.missing == ()
    # The image provides all but the omissions: each is the agent's.
    omitted = {each.partition(": ")[0] for each in layer.omitted}
    subjects = {*wanted.files, *wanted.directories, *wanted.links, *wanted.units}
    assert subjects - split.provided == omitted


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemctl is not installed")
def test_systemctl_reads_the_enablement_of_the_layer(tmp_path: Path) -> None:
    with tarfile.open(
        fileobj=io.BytesIO(gzip.decompress(make_config_layer(FULL).tar_gz))
    ) as archive:
        for entry in archive.getmembers():
            if entry.name.startswith("etc/systemd"):
                archive.extract(entry, tmp_path, set_attrs=False)
    states = {
        unit: subprocess.run(
            ["systemctl", f"--root={tmp_path}", "is-enabled", unit],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        ).stdout.strip()
        for unit in ("app.service", "off.service", "masked.service", "worker@one.service")
    }
    assert states == {
        "app.service": "enabled",
        "off.service": "disabled",
        "masked.service": "masked",
        "worker@one.service": "enabled",
    }
