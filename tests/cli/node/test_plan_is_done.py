"""``treenail once`` applies the steps that ``treenail plan`` prints."""

import contextlib
import io
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.configs import ENCODINGS, ignition
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.cli.node.main import main
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import LedgerRecord, Phase, Target, UpdateRecord, to_json

OLD, NEW = Target("old"), Target("new")
UPDATE = UpdateRecord("1" * 32, NEW, OLD, Phase.STAGING, "boot", 1.0, 1.0)


def run_json(*arguments: str) -> dict[str, object]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main([*arguments, "--json"])
    found = json.loads(output.getvalue())
    assert isinstance(found, dict)
    return found


@contextlib.contextmanager
def machine(*documents: dict[str, object]) -> Iterator[Path]:
    """A root with the users that configs name, and the configs as they are kept."""
    # Flushes are for other tests.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tn", dir=memory) as folder:
        root = Path(folder)
        (root / "etc").mkdir()
        (root / "etc/vendor").write_text("the vendor's")
        (root / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\n")
        (root / "etc/group").write_text("core:x:1000:\n")
        (root / "etc/shadow").write_text("core:*:1::::::\n")
        for target, document in zip((OLD, NEW), documents, strict=True):
            config = MachineConfig(ObjectMeta(name=target.config), config=document)
            path = root / f"var/lib/treenail/configs/{target.config}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(config.to_json()))
        yield root


class Draw:
    """Configs whose entries are not in each other's way; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def config(self) -> dict[str, object]:
        some = self._random.choice
        storage = {
            "files": [
                {
                    "path": path,
                    "overwrite": True,
                    "mode": some([0o644, 0o600]),
                    "user": some([{}, {"name": "core"}]),
                    "contents": some(ENCODINGS)(some([b"", b"one", b"two"])),
                }
                for path in self._some("/etc/a", "/etc/vendor", "/opt/d/b", "/var/c")
            ],
            "directories": [
                {"path": path, "mode": some([0o755, 0o700])}
                for path in self._some("/srv", "/opt/e")
            ],
            "links": [
                {"path": path, "target": some(["/etc/a", "/etc/b"]), "overwrite": True}
                for path in self._some("/etc/link", "/opt/f/link")
            ],
        }
        units = [
            {
                "name": name,
                "contents": some([None, "[Install]\nWantedBy=multi-user.target\n"]),
                "enabled": some([None, True, False]),
                "mask": some([None, False, True]),
                "dropins": some([[], [{"name": "10-a.conf", "contents": some(["", "[Unit]\n"])}]]),
            }
            for name in self._some("a.service", "b.service", "c.timer")
        ]
        users = [
            {
                "name": "core",
                "sshAuthorizedKeys": self._some("k1", "k2"),
                "passwordHash": some([None, "$6$a", "$6$b"]),
            }
            for _ in range(some([0, 1]))
        ]
        return ignition(storage=storage, systemd={"units": units}, passwd={"users": users})

    def _some(self, *values: str) -> list[str]:
        return [value for value in values if self._random.random() < 0.6]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
@pytest.mark.parametrize("start", range(0, 100, 25))
def test_plan_steps_equal_applied_steps(start: int) -> None:
    for seed in range(start, start + 25):
        draw = Draw(seed)
        with machine(draw.config(), draw.config()) as root:
            kept = root / "var/lib/treenail/configs"
            run_json("once", str(kept / "old.json"), "--root", str(root))
            Ledger(Root(root)).write_document(to_json(LedgerRecord(OLD, UPDATE)))
            planned = run_json("plan", "--root", str(root))["steps"]
            done = run_json("once", str(kept / "new.json"), "--root", str(root))["steps"]
            assert done == planned, seed
            assert run_json("plan", "--root", str(root))["steps"] == [], seed
