"""Emulated crictl and ctr: the images of a container runtime, their pins and their collection.

The name of the socket decides whether the runtime is CRI-O or containerd. Its images are pull specs
in one file. CRI-O reads its drop-in at each call, as after a reload. A collection of garbage, here
``crictl rmi --prune``, removes every image that is not pinned.
"""

import base64
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treenail_lab.machine.programs.context import ProgramContext

_STORAGE = "var/lib/containers/storage/cri-images.json"
_CRIO_PINS = "etc/crio/crio.conf.d/50-pinned-images"
_LABEL = "io.cri-containerd.pinned"


def run_crictl(host: ProgramContext, arguments: list[str]) -> int:
    """Run a command of crictl; print what the real one prints."""
    options: dict[str, str] = {}
    while arguments and arguments[0].startswith("--"):
        option, has_value, value = arguments[0].partition("=")
        options[option] = value if has_value else arguments[1]
        arguments = arguments[1 if has_value else 2 :]
    endpoint = options.get("--image-endpoint", "")
    if not Path(endpoint.removeprefix("unix://")).exists():
        return _fail(
            f'validate service connection: validate CRI v1 image API for endpoint "{endpoint}": '
            "rpc error: code = Unavailable desc = connection error: connect: no such file or "
            "directory"
        )
    is_crio = endpoint.endswith("/crio.sock")
    match arguments:
        case ["version"]:
            print(f"Version:  0.1.0\nRuntimeName:  {'cri-o' if is_crio else 'containerd'}")
            return 0
        case ["images", "--output=json"]:
            with _open_storage(host) as stored:
                pinned = _find_pinned(host, stored, is_crio=is_crio)
                print(json.dumps({"images": [_describe(name, pinned) for name in sorted(stored)]}))
            return 0
        case ["pull", image]:
            return _pull_image(host, image)
        case ["rmi", "--prune"]:
            with _open_storage(host) as stored:
                for name in set(stored) - _find_pinned(host, stored, is_crio=is_crio):
                    del stored[name]
            return 0
        case _:
            return _fail(f"no such command: {' '.join(arguments)}")


def run_ctr(host: ProgramContext, arguments: list[str]) -> int:
    """Run ``ctr images label``; an empty value removes the label."""
    match arguments:
        case ["--address", _, "--namespace", "k8s.io", "images", "label", image, label]:
            name, _, value = label.partition("=")
            with _open_storage(host) as stored:
                if image not in stored:
                    return _fail(f'image "{image}": not found', program="ctr")
                stored[image] = value if name == _LABEL else stored[image]
            return 0
        case _:
            return _fail(f"no such command: {' '.join(arguments)}", program="ctr")


def _pull_image(host: ProgramContext, image: str) -> int:
    reading = f'pulling image: rpc error: code = NotFound desc = failed to pull "{image}": '
    remote = host.find_image(image)
    if remote is None:
        return _fail(f"{reading}{image}: not found")
    login = base64.b64decode(os.environ.get("CRICTL_AUTH", "")).decode()
    expected = remote.credential
    if expected is not None and login != f"{expected.username}:{expected.password}":
        return _fail(f"{reading}pull access denied: authorization failed")
    host.wait(remote.size_bytes / host.settings().pull_bytes_per_s)
    if failure := remote.faults.get("pull", ""):
        return _fail(f"pulling image: rpc error: code = Unknown desc = {failure}")
    with _open_storage(host) as stored:
        stored.setdefault(image, "")
    print(f"Image is up to date for {remote.digest}")
    return 0


def _describe(name: str, pinned: frozenset[str]) -> dict[str, object]:
    return {
        "id": name.rpartition("@")[2],
        "repoTags": [],
        "repoDigests": [name],
        "pinned": name in pinned,
    }


def _find_pinned(host: ProgramContext, stored: dict[str, str], *, is_crio: bool) -> frozenset[str]:
    if not is_crio:
        return frozenset(name for name, label in stored.items() if label == "pinned")
    drop_in = host.root / _CRIO_PINS
    return frozenset(re.findall(r'"([^"]+)"', drop_in.read_text()) if drop_in.exists() else ())


@contextmanager
def _open_storage(host: ProgramContext) -> Iterator[dict[str, str]]:
    """Open the label of each image, alone; write back what the caller changes."""
    path = host.root / _STORAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        stored = json.loads(text or "{}")
        yield stored
        if json.dumps(stored) != text:
            file.seek(0)
            file.truncate()
            file.write(json.dumps(stored))


def _fail(text: str, *, program: str = "crictl") -> int:
    prefix = "ctr: " if program == "ctr" else 'time="2026-01-01T00:00:00Z" level=fatal msg='
    print(f"{prefix}{json.dumps(text) if program == 'crictl' else text}", file=sys.stderr)
    return 1
