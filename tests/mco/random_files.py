"""Random configs of files, units and keys, and the trees that they meet, the same for each seed."""

import base64
import gzip
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]

VENDOR_UNITS = {
    "vendor.service": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n",
    "other.service": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
    "Alias=alias.service\n",
    "inst@.service": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
    "DefaultInstance=one\n",
    "static.service": "[Service]\nExecStart=/bin/true\n",
    **{f"{name}.target": "[Unit]\nDescription=x\n" for name in ("multi-user", "timers", "sockets")},
    "sock.socket": "[Socket]\nListenStream=/run/x\n[Install]\nWantedBy=sockets.target\n",
}
_PATHS = (
    "/etc/a.conf", "/etc/deep/er/b.conf", "/etc/é x", "/etc/with%20escape", "/var/lib/x/y",
    "/opt/tool/bin/run", "/usr/local/bin/script.sh", "/usr/local/etc/z", "/root/.config",
    "/etc/linked/inside", "/srv/data", "/home/core/file", "/etc/hostname", "/etc/motd",
    "/etc/sub dir/f", "/etc/systemd/journald.conf.d/10-x.conf", "/etc/.hidden", "/etc/x.d/y.d/z",
)  # fmt: skip
_TEXTS = ("", "x\n", "no end", "é ☃\n", "a=1\nb=2\n", "\ttab\r\n", "0" * 5000, "'\"\\%\n", "\n\n")
_MODES = (None, 0o644, 0o600, 0o755, 0o400, 0o444, 0o640, 0o700, 0)
_USERS = ({}, {}, {"id": 0}, {"name": "core"}, {"id": 1234}, {"name": "root"}, {"name": ""})
_UNITS = (
    "a.service", "b@.service", "b@x.service", "c.timer", "d.path", "vendor.service",
    "other.service", "static.service", "inst@two.service", "sock.socket", "absent.service",
    "e.target",
)  # fmt: skip
_ALSO = "Also=vendor.service\n"
_WANTS = (
    "WantedBy=multi-user.target\n", "RequiredBy=multi-user.target\n",
    "WantedBy=multi-user.target timers.target\n", "Alias=alias-of.service\n",
    "WantedBy=multi-user.target\n" + _ALSO, "WantedBy=a.service\n", "",
    "DefaultInstance=d\nWantedBy=multi-user.target\n",
)  # fmt: skip
_PRESETS = ("disable *\n", "disable *\nenable vendor.service\n", "enable *\n",
            "enable a.service\nenable c.timer\ndisable *\n")  # fmt: skip
_KEYS = ("ssh-ed25519 AAAA one", "ssh-rsa BBBB two é", "# comment", "ssh-ed25519 CCCC three")
_HASHES = ("$6$salt$hash", "$y$j9T$abc$def", "", "*", "!")


class RandomFiles:
    """Generator of an Ignition config and of what is on the machine before."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make_config(self) -> Json:
        """Return a config that needs a reboot, so that the daemon touches no service."""
        version = self._pick(("3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", "3.5.0"))
        paths = self._random.sample(_PATHS, self._random.randint(0, 6))
        files = [self._make_file(path) for path in paths]
        files.append({"path": "/etc/always", "contents": {"source": "data:,1"}})
        config: Json = {
            "ignition": {"version": version},
            "storage": {"files": files},
            "systemd": {"units": self._make_units()},
        }
        if self._flip(0.4):
            config["passwd"] = {"users": [self._make_user()]}
        return config

    def make_before(self) -> dict[str, Any]:
        """Return the files, links and directories by path, and the text of the presets.

        A file is a text, a mode and an owner; a link is its target; a directory is None.
        """
        found: Json = {"/etc/linked": "../var/linked", "/var/linked": None}
        for path in self._random.sample(_PATHS, self._random.randint(0, 4)):
            if path == "/etc/linked/inside":
                continue
            match self._random.random():
                case chance if chance < 0.75:
                    found[path] = (self._pick(_TEXTS), self._pick((0o644, 0o600, 0o755)),
                                   self._pick((0, 0, 1000)))  # fmt: skip
                case chance if chance < 0.9:
                    found[path] = self._pick(("/etc/target-of-link", "../nowhere"))
                case _:
                    found[path] = None
        for name in self._random.sample(_UNITS, self._random.randint(0, 2)):
            place = f"/etc/systemd/system/{name}"
            if self._flip(0.5):
                found[place] = "/dev/null"
            else:
                found[place] = (self._make_unit_text(name).replace(_ALSO, ""), 0o644, 0)
        if self._flip(0.3):
            wants = "/etc/systemd/system/multi-user.target.wants/vendor.service"
            found[wants] = "/usr/lib/systemd/system/vendor.service"
        return {"tree": found, "presets": self._pick(_PRESETS)}

    def _make_file(self, path: str) -> Json:
        file: Json = {"path": path}
        if self._flip(0.95):
            file["contents"] = self._make_contents()
        mode = self._pick(_MODES)
        if mode is not None:
            file["mode"] = mode
        user, group = self._pick(_USERS), self._pick(_USERS)
        file |= {"user": user} if user else {}
        file |= {"group": group} if group else {}
        if self._flip(0.5) and "contents" in file:
            file["overwrite"] = True
        return file

    def _make_contents(self) -> Json:
        text = self._pick(_TEXTS)
        raw = text.encode()
        encoders: tuple[Callable[[], Json], ...] = (
            lambda: {"source": "data:," + quote(text)},
            lambda: {"source": "data:text/plain;charset=utf-8;base64," + _encode(raw)},
            lambda: {"source": "data:;base64," + _encode(raw), "compression": ""},
            lambda: {
                "source": "data:;base64," + _encode(gzip.compress(raw, mtime=0)),
                "compression": "gzip",
            },
        )
        return self._pick(encoders)()

    def _make_units(self) -> list[Json]:
        names = self._random.sample(_UNITS, self._random.randint(0, 5))
        return [self._make_unit(name) for name in names]

    def _make_unit(self, name: str) -> Json:
        unit: Json = {"name": name}
        # The daemon does not enable an instance of a vendor's template, treenail does.
        if self._flip(0.65) or name == "inst@two.service":
            unit["contents"] = (
                "" if name != "inst@two.service" and self._flip(0.1) else self._make_unit_text(name)
            )
        if self._flip(0.6):
            unit["enabled"] = self._flip(0.7)
        if not unit.get("enabled") and "contents" in unit:
            # Only the daemon disables what a unit names that was never enabled.
            unit["contents"] = unit["contents"].replace(_ALSO, "")
        if self._flip(0.15):
            unit["mask"] = self._flip(0.6)
        if unit.get("mask"):
            # The daemon fails to enable or disable what it has masked.
            unit.pop("enabled", None)
        if self._flip(0.3):
            unit["dropins"] = [
                {"name": dropin, "contents": self._pick(("[Service]\nNice=5\n", "[Unit]\n", ""))}
                for dropin in self._random.sample(("10-a.conf", "20 b.conf"),
                                                  self._random.randint(1, 2))
            ]  # fmt: skip
        return unit

    def _make_unit_text(self, name: str) -> str:
        wants = self._pick(_WANTS)
        # Only systemctl checks that an alias has the type of its unit.
        kind = "" if "@" in name else name.rpartition(".")[2]
        alias = f"Alias=alias-of.{kind}\n" if kind else ""
        wants = wants.replace("Alias=alias-of.service\n", alias)
        install = f"[Install]\n{wants}" if wants else ""
        return f"[Unit]\nDescription=x\n[Service]\nExecStart=/bin/true\n{install}"

    def _make_user(self) -> Json:
        user: Json = {"name": "core"}
        # The daemon writes an empty file for a user without keys, and refuses one without anything.
        user["sshAuthorizedKeys"] = self._random.sample(_KEYS, self._random.randint(1, 3))
        if self._flip(0.4):
            user["passwordHash"] = self._pick(_HASHES)
        return user

    def _flip(self, chance: float) -> bool:
        return self._random.random() < chance

    def _pick(self, values: Any) -> Any:
        return self._random.choice(values)


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
