"""Read the config of a hosted node from the ConfigMap of its NodePool, and refuse bad ones."""

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.objects import Json
from tests.integration.hosted_site import make_config, make_payload
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted.node_mode import HostedMode
from treenail.api.machineconfig import MachineConfig
from treenail.config.ignition import hosted_payload
from treenail.config.node_paths import FIRST_BOOT_ANNOTATIONS, PULL_SECRET, SERVED_CONFIG
from treenail.daemon.cluster.hosted_client import (
    HostedMCDState,
    check_delivery,
    drop_pull_secret,
)
from treenail.errors import (
    ClusterError,
    ConfigError,
    ConfigPendingError,
    NotFoundError,
    TreenailError,
)
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root

# The config that is needed, the hash of the ConfigMap, the desired config, that of the ledger, and
# what follows.
DELIVERIES: list[tuple[str, str, str, str, type[TreenailError] | None]] = [
    ("a", "a", "a", "", None),
    ("a", "a", "b", "", None),
    ("a", "b", "a", "", ConfigPendingError),
    ("a", "", "a", "", ConfigPendingError),
    ("a", "b", "b", "", NotFoundError),
    ("a", "b", "b", "a", ClusterError),
    ("a", "b", "a", "a", ClusterError),
    ("a", "", "", "", NotFoundError),
]


@pytest.mark.parametrize(("name", "delivered", "desired", "applied", "error"), DELIVERIES)
def test_config_is_taken_when_hash_and_annotation_agree(
    name: str, delivered: str, desired: str, applied: str, error: type[TreenailError] | None
) -> None:
    if error is None:
        check_delivery(name, delivered, "ConfigMap x", desired=desired, applied=applied)
        return
    with pytest.raises(error, match="ConfigMap x") as found:
        check_delivery(name, delivered, "ConfigMap x", desired=desired, applied=applied)
    # Only a copy of the cache may take the place of a config that is not delivered.
    assert found.type is error


def pack(document: object) -> str:
    return base64.b64encode(gzip.compress(json.dumps(document).encode())).decode()


def pack_files(*files: object) -> str:
    return pack({"ignition": {"version": "3.2.0"}, "storage": {"files": list(files)}})


CONFIG = make_config("rendered-1", {"/etc/a": "1"})
GOOD = make_payload(CONFIG)
BAD = {
    "empty": "",
    "no base64": "%%%",
    "no gzip": base64.b64encode(b"{}").decode(),
    "cut": GOOD[: len(GOOD) // 8 * 4],
    "no JSON": base64.b64encode(gzip.compress(b"{")).decode(),
    "a list": pack([]),
    "no files": pack({"storage": {}}),
    "files of another kind": pack({"storage": {"files": "x"}}),
    "no config": pack_files({"path": "/etc/a"}),
    "config without contents": pack_files({"path": SERVED_CONFIG}),
    "config elsewhere": pack_files(
        {"path": SERVED_CONFIG, "contents": {"source": "https://example.com"}}
    ),
    "no MachineConfig": make_payload({"kind": "Secret"}),
}


def decode_payload(payload: str) -> MachineConfig:
    return MachineConfig.from_json(hosted_payload.unpack_payload(payload, 64 * 1024 * 1024))


@pytest.mark.parametrize("payload", BAD.values(), ids=BAD)
def test_damaged_payload_is_refused(payload: str) -> None:
    with pytest.raises(ConfigError):
        decode_payload(payload)


def test_large_payload_is_refused() -> None:
    payload = base64.b64encode(gzip.compress(b" " * (64 * 1024 * 1024 + 1))).decode()
    with pytest.raises(ConfigError, match="at most"):
        decode_payload(payload)


def test_payloads_of_hypershift_and_of_treenail_have_the_config() -> None:
    config = MachineConfig.from_json(CONFIG)
    assert decode_payload(GOOD) == config
    assert decode_payload(hosted_payload.build_payload(config)) == config


CONTENTS: list[Json | None] = [None, {}, {"storage": None}, {"storage": {"files": [None, 1]}}]


def test_pull_secret_is_left_out_and_nothing_else() -> None:
    both = MachineConfig.from_json(make_config("x", {"/etc/a": "1", PULL_SECRET: "{}"}))
    one = MachineConfig.from_json(make_config("x", {"/etc/a": "1"}))
    assert drop_pull_secret(both) == drop_pull_secret(one) == one
    for content in CONTENTS:
        odd = replace(one, config=content)
        assert drop_pull_secret(odd) == odd


NAMES = [("0123456789abcdef", True), ("rendered-master-1", False), ("0a0b0c0d", False), ("", False)]


@pytest.mark.parametrize(("name", "is_own"), NAMES)
def test_first_annotations_are_those_of_treenails_server(
    tmp_path: Path, name: str, *, is_own: bool
) -> None:
    place = tmp_path / FIRST_BOOT_ANNOTATIONS[1:]
    place.parent.mkdir(parents=True)
    annotations = {key.CURRENT_CONFIG: name, key.DESIRED_CONFIG: name}
    place.write_text(json.dumps(annotations))
    found = HostedMCDState(HostFiles(Root(tmp_path))).read_annotations()
    assert found == (annotations if is_own else {})


def test_drainer_answers_beside_the_request() -> None:
    mode = HostedMode("np", "ns")
    assert mode.applied_drain_annotation == key.LAST_APPLIED_DRAIN
    own = replace(mode, drain_annotation=hosted_key.HOSTED_DRAIN)
    assert own.applied_drain_annotation == hosted_key.HOSTED_APPLIED_DRAIN
