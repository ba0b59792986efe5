"""Specs of MachineConfigs that no node can apply, each with a part of the error."""

import base64
import gzip
from typing import Any

Json = dict[str, Any]
DIGEST = "registry.example.com/os/node@sha256:" + 64 * "a"
FIRST_FILE = "spec.config.storage.files[0].contents"


def with_ignition(**sections: Any) -> Json:
    own = {"version": "3.4.0", **sections.pop("ignition", {})}
    return {"config": {"ignition": own, **sections}}


def with_contents(**contents: Any) -> Json:
    return with_ignition(storage={"files": [{"path": "/etc/a", "contents": contents}]})


def encode(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def with_link(target: str) -> Json:
    link = {"path": "/etc/b", "target": target, "hard": True}
    return with_ignition(storage={"links": [link]})


CASES: dict[str, tuple[Json, str]] = {
    "merge": (
        with_ignition(ignition={"config": {"merge": [{"source": "https://example.com/a"}]}}),
        "spec.config.ignition.config.merge: a node fetches no other configs",
    ),
    "replace": (
        with_ignition(ignition={"config": {"replace": {"source": "data:,%7B%7D"}}}),
        "spec.config.ignition.config.replace: a node fetches no other configs",
    ),
    "remote": (
        with_contents(source="https://example.com/a"),
        f"{FIRST_FILE}.source: expected a data: URL, found a remote URL",
    ),
    "s3": (
        with_contents(source="s3://bucket/key"),
        f"{FIRST_FILE}.source: expected a data: URL, found a remote URL",
    ),
    "no-gzip": (
        with_contents(source="data:,text", compression="gzip"),
        f"{FIRST_FILE}.source: expected gzip, found other data",
    ),
    "cut-gzip": (
        with_contents(source=encode(gzip.compress(b"text")[:-4]), compression="gzip"),
        f"{FIRST_FILE}.source: expected gzip, found truncated gzip",
    ),
    "hash": (
        with_contents(source="data:,text", verification={"hash": "sha256-" + 64 * "0"}),
        f"{FIRST_FILE}.verification.hash: the contents have another digest",
    ),
    "tag": (
        {"osImageURL": "registry.example.com/os/node:latest"},
        "spec.osImageURL is 'registry.example.com/os/node:latest', but it names a tag",
    ),
    "no-digest": (
        {"osImageURL": "registry.example.com/os/node"},
        "spec.osImageURL is 'registry.example.com/os/node', but it has no digest",
    ),
    "extensions-by-tag": (
        {
            "osImageURL": DIGEST,
            "baseOSExtensionsContainerImage": "registry.example.com/more:1",
            "extensions": ["usbguard"],
        },
        "spec.baseOSExtensionsContainerImage is 'registry.example.com/more:1', but it names a tag",
    ),
    "link": (
        with_link("../a"),
        "spec.config.storage.links[0].target: expected an absolute path without '..'",
    ),
    "arguments": (
        {"kernelArguments": ["a\tb", "a\x01b"]},
        "spec.kernelArguments[1]: expected no control character",
    ),
}
APPLIED: dict[str, Json] = {
    "contents": with_contents(source=encode(gzip.compress(b"text")), compression="gzip"),
    "empty-merge": with_ignition(ignition={"config": {"merge": [], "replace": {}}}),
    "of-installers": with_ignition(
        ignition={"config": {}, "proxy": {}, "security": {"tls": {}}, "timeouts": {}}
    ),
    "image": {"osImageURL": DIGEST},
    "image-with-tag": {"osImageURL": DIGEST.replace("@", ":1@")},
    "unused-extensions": {"baseOSExtensionsContainerImage": "registry.example.com/more:1"},
    "first-boot": with_ignition(storage={"disks": [{"device": "/dev/a"}]}),
}


def make_machine_config(name: str, spec: Json) -> Json:
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {
            "name": name,
            "labels": {"machineconfiguration.openshift.io/role": "worker"},
        },
        "spec": spec,
    }
