"""Random MachineConfigs over all fields of Ignition 2.2 and 3.0 to 3.5, the same for each seed."""

import base64
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Json = dict[str, Any]
Make = Callable[[], Any]

VERSIONS = ("2.2.0", "3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", "3.5.0")
ROLE = "machineconfiguration.openshift.io/role"

_PATHS = ("/etc/a", "/etc/b", "/etc/a/b", "/etc/ab", "/usr/local/é x", "/var/lib/c", "/opt/d")
_BAD_PATHS = ("etc/a", "/etc//a", "/etc/../a", "/etc/a/", "")
_UNITS = ("a.service", "b@.service", "b@x.service", "c.mount", "d.timer")
_UNIT_TEXTS = (
    "", "[Unit]\nDescription=x\n", "[Service]\nExecStart=/bin/true \\\n  --x\n\n[Install]\n",
    "# comment\n[Unit]\n;x\\\nIgnored\nA=1", "no section\n", "[Service]\r\nType=oneshot\r\n",
)  # fmt: skip
_BAD_UNIT_TEXTS = ("[Unit\n", "[Unit]x\nA=1\n", "[Unit]\nnothing\n", "[Unit]\nA")
_TEXTS = (
    "x", "yes", "null", "1e3", "0x1f", "a: b", "# c", "é", "line\nline\n", " pad ", "tab\t", "\x01",
    "\u2028", "'q'", '"q"', "2020-01-01", "x" * 90 + " y", "",
)  # fmt: skip
_SHA256 = "sha256-" + "0" * 64
_CONTROLS = ("a\x7fb", "a\x80b", "a\x9f", "a\ufffe")
_DAMAGE = (
    0, -1, 1, 70000, "x", "", "/etc/zz", "/", True, False, None, [], {}, 1.5, 2**70, ["x"], [{}],
    "http://a b", "3.4.0", "é" * 40, "a:b", "data:,", _SHA256,
)  # fmt: skip
_HASH = "sha512-" + "0" * 128
_GZIP = "H4sIAAAAAAAAA6tQAABUv1L8AQAAAA=="
_GUID = "01234567-89AB-cdef-0123-456789abcdef"


def make_case(kind: str, seed: int) -> tuple[list[Json], list[Json] | None]:
    """Return the MachineConfigs of a pool, and those of its current config if it has one.

    The kinds are ``random``, ``damaged`` (with one or two values that mostly are invalid) and
    ``changed`` (with a current config).
    """
    made = RandomConfigs(seed, 0.01 if kind == "random" else 0.003)
    pool = made.make_pool()
    if kind == "random":
        return pool, None
    if kind == "damaged":
        made.damage_pool(pool)
        return pool, None
    changed = copy.deepcopy(pool)
    match seed % 5:
        case 0 if len(changed) > 1:
            changed.pop()
        case 1 | 2:
            made.damage_pool(changed)
        case 3:
            more = made.make_pool()[0]
            more["metadata"]["name"] = "zz"
            changed.append(more)
    return changed, pool


class RandomConfigs:
    """Generator of pools; one value in ``1 / spice`` is unusual or invalid."""

    def __init__(self, seed: int, spice: float = 0.01) -> None:
        self._random = random.Random(seed)
        self._spice = spice
        self._version = "3.5.0"

    def make_pool(self) -> list[Json]:
        """Return the MachineConfigs of one pool, in any order."""
        is_plain = self._flip(0.3)
        found = [
            self._make_config(f"{number:02}-{self._pick('abc')}", is_plain=is_plain)
            for number in range(self._random.randint(1, 4))
        ]
        self._random.shuffle(found)
        return found

    def damage_pool(self, configs: list[Json]) -> None:
        """Repeat, remove or replace one or two values of the Ignition configs."""
        found = [each["spec"]["config"] for each in configs if each["spec"].get("config")]
        for _ in range(self._random.randint(1, 2) if found else 0):
            parent, key = self._pick(list(_find_values(self._pick(found))) or [({"": 0}, "")])
            match self._random.random():
                case chance if chance < 0.15 and isinstance(parent, list):
                    parent.append(copy.deepcopy(parent[key]))
                case chance if chance < 0.3:
                    del parent[key]
                case _:
                    parent[key] = copy.deepcopy(self._pick(_DAMAGE))

    def _make_config(self, name: str, *, is_plain: bool) -> Json:
        spec: Json = self._some(
            0.3,
            kernelArguments=lambda: self._list(self._text, 3),
            kernelType=lambda: self._pick(("", "default", "realtime", "64k-pages")),
            extensions=lambda: [self._pick(("usbguard", "sysstat", "kernel-devel"))],
            fips=self._flag,
            osImageURL=lambda: self._pick(("", "registry.example.com/mine@sha256:33")),
            baseOSExtensionsContainerImage=lambda: self._pick(("", "registry.example.com/ext")),
        )
        if self._bad():
            spec["kernelType"] = "rt"
        if self._flip(0.9):
            self._version = "3.5.0" if is_plain else self._pick(VERSIONS)
            spec["config"] = self._make_ignition()
        role = self._pick(("worker", "worker", "infra"))
        return {"metadata": {"name": name, "labels": {ROLE: role}}, "spec": spec}

    def _make_ignition(self) -> Json:
        is_old = self._version == "2.2.0"
        header = {"version": self._version}
        if self._flip(0.1):
            header |= self._make_header()
        config: Json = {"ignition": header}
        config |= self._some(
            0.5,
            passwd=lambda: self._some(0.4, users=self._make_users, groups=self._make_groups),
            storage=self._make_storage2 if is_old else self._make_storage,
            systemd=lambda: {"units": self._make_units()},
        )
        if self._flip(0.15):
            config["kernelArguments"] = self._some(
                0.7,
                shouldExist=lambda: self._distinct(_TEXTS, 2),
                shouldNotExist=lambda: self._distinct(("gone", "quiet"), 2),
            )
        if self._bad():
            config["stroage"] = {}
        return config

    def _make_header(self) -> Json:
        merge = "append" if self._version == "2.2.0" else "merge"
        return self._some(
            0.4,
            config=lambda: self._some(
                0.6, replace=self._resource, **{merge: lambda: [self._resource()]}
            ),
            proxy=lambda: self._some(
                0.6,
                httpProxy=lambda: "http://proxy",
                httpsProxy=lambda: "ftp://x" if self._bad() else "https://proxy",
                noProxy=lambda: self._distinct(("a", "b", "c"), 2),
            ),
            security=lambda: {"tls": {"certificateAuthorities": [self._resource()]}},
            timeouts=lambda: self._some(0.6, httpResponseHeaders=self._int, httpTotal=self._int),
        )

    def _make_storage(self) -> Json:
        paths = self._distinct(_PATHS, 5)
        split = sorted(self._random.choices(range(len(paths) + 1), k=2))
        common = self._some(
            0.2,
            disks=self._make_disks,
            filesystems=self._make_filesystems,
            raid=self._make_raid,
            luks=self._make_luks,
        )
        return {
            "files": [self._make_file(path) for path in paths[: split[0]]],
            "directories": [
                self._make_node(path, mode=self._mode) for path in paths[split[0] : split[1]]
            ],
            "links": [
                self._make_node(
                    path, target=lambda: self._pick(("/etc/x", "../y", "b")), hard=self._flag
                )
                | ({} if self._bad() else {"target": "/etc/t"})
                for path in paths[split[1] :]
                if self._flip(0.5)
            ],
            **common,
        }

    def _make_storage2(self) -> Json:
        found = self._some(
            0.5,
            files=lambda: [
                self._make_node(path, contents=self._resource, mode=self._mode)
                | {"filesystem": "root"}
                | self._some(self._spice, append=lambda: True)
                for path in self._random.choices(_PATHS[3:], k=2)
            ],
            directories=lambda: [
                self._make_node("/srv/x/", mode=self._mode) | {"filesystem": "root"}
            ],
            links=lambda: [
                self._make_node("/srv/l", target=lambda: "x", hard=self._flag)
                | {"filesystem": "root", "target": "t"}
            ],
        )
        return found | self._some(
            0.05,
            disks=lambda: [{"device": "/dev/sda", "wipeTable": self._flag()}],
            raid=self._make_raid,
            filesystems=lambda: [{"name": "root", "path": "/sysroot"}],
        )

    def _make_file(self, path: str) -> Json:
        return self._make_node(path, contents=self._resource, mode=self._mode) | self._some(
            self._spice, append=lambda: [self._resource()], overwrite=lambda: True
        )

    def _make_node(self, path: str, **more: Make) -> Json:
        owners = {"user": self._owner, "group": self._owner}
        found = self._some(0.6, **more) | self._some(0.2, **owners, overwrite=lambda: False)
        return {"path": self._pick(_BAD_PATHS) if self._bad() else path, **found}

    def _make_units(self) -> list[Json]:
        return [
            {"name": name}
            | self._some(
                0.5,
                contents=self._unit_text,
                enabled=self._flag,
                mask=self._flag,
                dropins=lambda: [
                    {"name": dropin} | self._some(0.8, contents=self._unit_text)
                    for dropin in self._distinct(("10-a.conf", "20-b.conf"), 2)
                ],
            )
            | (self._some(0.5, enable=self._flag) if self._version == "2.2.0" else {})
            for name in self._distinct(("x.conf",) if self._bad() else _UNITS, 3)
        ]

    def _make_users(self) -> list[Json]:
        user = {"name": "core"} | self._some(
            0.2,
            gecos=self._text,
            homeDir=lambda: "/home/core",
            noCreateHome=self._flag,
            noLogInit=self._flag,
            noUserGroup=self._flag,
            passwordHash=lambda: self._pick(("$6$x", "")),
            primaryGroup=lambda: "core",
            shell=lambda: "/bin/bash",
            shouldExist=self._flag,
            system=self._flag,
            uid=self._int,
            groups=lambda: self._distinct(("wheel", "adm"), 2),
            sshAuthorizedKeys=lambda: self._distinct(("k1", "k2", "k3 é"), 3),
        )
        return [user, {"name": "eve"}] if self._bad() else [user]

    def _make_groups(self) -> list[Json]:
        return [
            {"name": name}
            | self._some(
                0.4,
                gid=self._int,
                passwordHash=self._text,
                shouldExist=self._flag,
                system=self._flag,
            )
            for name in self._distinct(("g1", "g2"), 2)
        ]

    def _make_disks(self) -> list[Json]:
        return [
            {"device": device, "partitions": self._make_partitions()}
            | self._some(0.4, wipeTable=self._flag)
            for device in self._distinct(("/dev/sda", "/dev/sdb"), 2)
        ]

    def _make_partitions(self) -> list[Json]:
        found = []
        for number in range(1, 1 + self._random.randint(0, 3)):
            part = {"label": f"p{number}", "number": self._pick((0, number))}
            part |= self._some(
                0.3,
                sizeMiB=lambda: self._pick((0, 10)),
                startMiB=lambda number=number: self._pick((0, 100 * number)),  # type: ignore[misc]
                guid=lambda: self._pick((_GUID, "")),
                typeGuid=lambda: "nonsense" if self._bad() else _GUID,
                resize=self._flag,
                wipePartitionEntry=self._flag,
                shouldExist=lambda: not self._bad(),
            )
            if part["number"] and self._flip(0.3):
                del part["label"]
            elif self._flip(0.2):
                del part["number"]
            found.append(part)
        return found

    def _make_filesystems(self) -> list[Json]:
        kinds = ("ext4", "xfs", "btrfs", "swap", "vfat")
        return [
            {"device": device, "format": "ntfs" if self._bad() else self._pick(kinds)}
            | self._some(
                0.4,
                label=lambda: "far too long for any format " * 10 if self._bad() else "root",
                path=lambda: self._pick(("/var", "")),
                uuid=lambda: _GUID,
                wipeFilesystem=self._flag,
                mountOptions=lambda: ["ro", "ro"],
                options=lambda: self._list(self._text, 2),
            )
            for device in self._distinct(("/dev/sda1", "/dev/disk/by-label/x"), 2)
        ]

    def _make_raid(self) -> list[Json]:
        return [
            {"level": self._pick(("raid1", "stripe")), "devices": ["/dev/a", "/dev/b"]}
            | ({} if self._bad() else {"name": name})
            | self._some(0.3, spares=lambda: self._pick((0, 1)), options=lambda: ["--x"])
            for name in self._distinct(("md0", "md1"), 2)
        ]

    def _make_luks(self) -> list[Json]:
        return [
            {"name": name, "device": "/dev/sdc"}
            | self._some(
                0.3,
                clevis=self._make_clevis,
                cex=lambda: {"enabled": False},
                discard=self._flag,
                keyFile=self._resource,
                label=lambda: "label",
                openOptions=lambda: self._distinct(("--a", "--b"), 2),
                options=lambda: ["--c", "--c"],
                uuid=lambda: _GUID,
                wipeVolume=self._flag,
            )
            for name in self._distinct(("root", "data"), 2)
        ]

    def _make_clevis(self) -> Json:
        if self._flip(0.3):
            return {
                "custom": self._some(0.9, pin=lambda: "sss", config=lambda: "{}")
                | self._some(0.5, needsNetwork=self._flag)
            }
        return self._some(
            0.6,
            threshold=self._int,
            tpm2=self._flag,
            tang=lambda: [
                {"url": url, "thumbprint": "t"}
                | self._some(0.5, advertisement=lambda: self._pick(('{"a": 1}', "")))
                for url in self._distinct(("http://t1", "https://t2"), 2)
            ],
        )

    def _resource(self) -> Json:
        if self._bad():
            bad = ("data:;base64,%%", "ftp://x/y", "data:,%zz", "nonsense", "gs://b/o", "s3://b/o")
            return {"source": self._pick(bad)}
        if self._flip(0.15):
            headers = [{"name": "x"} | self._some(0.7, value=lambda: "1")]
            return {"source": "https://example.com/a"} | self._some(
                0.5, httpHeaders=lambda: headers, verification=lambda: {"hash": _HASH}
            )
        if self._bad():
            return {}
        raw = self._text().encode()
        if self._flip(0.2):
            return {"source": f"data:;base64,{_GZIP}", "compression": "gzip"}
        encoded = f"data:text/plain;charset=utf-8;base64,{base64.b64encode(raw).decode()}"
        return {"source": self._pick((encoded, "data:,plain%20text"))} | self._some(
            0.2, compression=lambda: "", verification=dict
        )

    def _owner(self) -> Json:
        if self._bad():
            return {"id": 1, "name": "core"}
        return self._pick(
            ({}, {"id": 0}, {"name": "root"}, {"id": 7}, {"name": "core"}, {"name": ""})
        )

    def _unit_text(self) -> str:
        return self._pick(_BAD_UNIT_TEXTS if self._bad() else _UNIT_TEXTS)

    def _text(self) -> str:
        return self._pick(_CONTROLS if self._bad() else _TEXTS)

    def _mode(self) -> int:
        return self._pick((0o1755, -1) if self._bad() else (0o644, 0o600, 0))

    def _int(self) -> int:
        return self._random.randint(0, 3)

    def _flag(self) -> bool:
        return self._flip(0.5)

    def _bad(self) -> bool:
        return self._flip(self._spice)

    def _flip(self, chance: float) -> bool:
        return self._random.random() < chance

    def _pick(self, values: Any) -> Any:
        return self._random.choice(values)

    def _list(self, make: Make, most: int) -> list[Any]:
        return [make() for _ in range(self._random.randint(0, most))]

    def _distinct(self, values: Any, most: int) -> list[Any]:
        return self._random.sample(list(values), self._random.randint(0, min(most, len(values))))

    def _some(self, chance: float, **makers: Make) -> Json:
        """Return a part of the fields; a value is rarely null."""
        return {
            name: None if self._flip(self._spice) else make()
            for name, make in makers.items()
            if self._flip(chance)
        }


def _find_values(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value below ``value`` as its parent and its key there."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield value, key
        yield from _find_values(inner)
