"""Ignition configs for tests: small fixed ones and generated valid ones."""

import base64
import gzip
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from treenail.api.ignition.parser import parse_ignition
from treenail.errors import IgnitionError

Json = dict[str, object]

CHARSET = "data:text/plain;charset=utf-8;base64,"
ENCODINGS: tuple[Callable[[bytes], Json], ...] = (
    lambda raw: {"source": "data:," + urllib.parse.quote(raw)},
    lambda raw: {"source": "data:;base64," + base64.b64encode(raw).decode()},
    lambda raw: {"source": CHARSET + base64.b64encode(raw).decode(), "compression": ""},
    lambda raw: {
        "source": "data:;base64," + base64.b64encode(gzip.compress(raw)).decode(),
        "compression": "gzip",
    },
    lambda raw: {
        "source": "data:text/plain," + urllib.parse.quote(gzip.compress(raw)),
        "compression": "gzip",
        "verification": {},
    },
)
"""Encodings of the same bytes."""


def ignition(version: str = "3.5.0", **sections: object) -> Json:
    """Build a config of these sections."""
    return {"ignition": {"version": version}, **sections}


def refusal(document: object) -> str:
    """The error of a config that is not parsed."""
    with pytest.raises(IgnitionError) as caught:
        parse_ignition(document)
    return str(caught.value).removeprefix("spec.config.")


def with_files(*files: Json, version: str = "3.5.0") -> Json:
    return ignition(version, storage={"files": list(files)})


def with_units(*units: Json, version: str = "3.5.0") -> Json:
    return ignition(version, systemd={"units": list(units)})


def with_users(*users: Json, version: str = "3.5.0") -> Json:
    return ignition(version, passwd={"users": list(users)})


names = st.text(st.sampled_from("abc.-_é"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
modes = st.none() | st.integers(0, 0o777)
flags = st.none() | st.booleans()
owners = st.sampled_from([None, {}, {"id": 0}, {"name": "root"}, {"id": 7}, {"name": "core"}])
texts = st.none() | st.sampled_from(["", "[Unit]\n", "[Service]\nExecStart=/bin/true\n"])


@st.composite
def contents(draw: st.DrawFn) -> Json:
    return draw(st.sampled_from(ENCODINGS))(draw(st.binary(max_size=40)))


def _entries(key: str, keys: st.SearchStrategy[str], **rest: st.SearchStrategy[object]) -> object:
    entries = st.fixed_dictionaries({key: keys}, optional=rest)
    return st.lists(entries, max_size=4, unique_by=lambda entry: entry[key])


units = _entries(
    "name",
    st.sampled_from(["a.service", "b@x.service", "c.mount", "d.timer"]),
    contents=texts,
    enabled=flags,
    mask=flags,
    dropins=_entries("name", names.map(lambda name: f"{name}.conf"), contents=texts),
)
users = _entries(
    "name",
    st.just("core"),
    sshAuthorizedKeys=st.lists(st.sampled_from(["k1", "k2", "k3"]), unique=True),
    passwordHash=st.sampled_from(["$6$a", "$6$b"]),
)
nodes = {"mode": modes, "user": owners, "group": owners}


@st.composite
def configs(draw: st.DrawFn) -> Json:
    """Generate a valid config of version 3.5 that a running node can apply."""
    document = ignition(
        storage={"files": draw(_entries("path", paths, contents=contents(), **nodes))},
        systemd={"units": draw(units)},
        passwd={"users": draw(users)},
    )
    if draw(st.booleans()):
        taken = {entry["path"] for entry in document["storage"]["files"]}
        found = draw(_entries("path", paths, **nodes))
        document["storage"]["directories"] = [
            entry for entry in found if entry["path"] not in taken
        ]
    return document
