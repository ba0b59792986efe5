"""Import rules, read from the sources: rows, rooms, owners of effects, pure packages.

A name that is imported for its type counts too: it ties the importer to the module.
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAX_MODULES = 15
"""Modules of a package, without those of its sub-packages."""

# The lab is a package of its own; in the rows it is called `lab`.
PACKAGES = {"agent/treenail": "treenail", "lab/treenail_lab": "treenail_lab"}

# From the lowest up. Imports go downwards only, and never sideways into another name of a row.
ROWS = (
    {"errors", "clocks", "memory", "observations", "oci_content", "sanitize"},
    {"deadline_socket", "encoding", "log", "process", "retry", "sd_notify", "units"},
    {"deployment_change", "label_selector"},
    {"api"},
    {"config"},
    {"update", "host", "kube", "registry", "image"},
    {"builder", "log_bundle"},
    {"daemon", "controllers"},
    {"provisioning"},
    {"installer"},
    {"manifests"},
    {"cli", "lab"},
    {"__main__"},
)
HEIGHT = {name: height for height, row in enumerate(ROWS) for name in row}

# Adapters know no MachineConfig: each could be a library of its own.
ADAPTERS = {"host", "kube", "registry"}
ADAPTERS_MAY_IMPORT = ROWS[0] | ROWS[1] | ROWS[2]

# Packages that a row allows and a package must not import: the builder runs in a container
# without a kubelet's machine, and talks to registries only. The RPM of the controllers has no host.
FORBIDDEN = {
    "builder": {"host", "kube", "update"},
    "controllers": {"host"},
    "provisioning": {"host", "daemon"},
    "installer": {"host", "daemon"},
    "manifests": {"host", "daemon"},
}

# A controller imports these and no other controller.
SHARED_BY_CONTROLLERS = ("controllers.pools.", "controllers.runtime.")
CONTROLLER_EXCEPTIONS = {
    "image_build": ("controllers.render.render",),
    "status": ("controllers.render.render",),
    # It gives NodePools to the reconciler of pools, and plans show a change of nodes as others do.
    "hosted": (
        "controllers.drain.",
        "controllers.render.render",
        "controllers.rollout.",
        "controllers.status.causes",
        "controllers.status.rollout_plan",
    ),
    # They share the objects of a watch.
    "generate": ("controllers.render.render",),
    # It hands over builds that this controller then owns.
    "handover": ("controllers.image_build.",),
}

PURE = {"api", "config", "update", "image"}
IMPURE_MODULES = {
    "os", "pathlib", "shutil", "socket", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
CALENDAR_READS = {"now", "today", "utcnow"}

# Each effect, and the only places that may have it.
OWNERS = {
    "aiohttp": {"lab"},
    "asyncio": {"lab"},
    # Of the extras controller and lab: no node needs it.
    "cryptography": {
        "builder.images.attachments",
        "provisioning.approval.request",
        "installer.bootstrap.installation_ca",
        "lab",
    },
    "gi": {"host.systemd.gio_bus", "lab"},
    "kubernetes": {"kube.transport.official"},
    "prometheus_client": {"controllers.runtime.controller_metrics"},
    "psutil": {"host.system.resources"},
    "pydbus": {"host.systemd.gio_bus", "lab"},
    # Of the extras controller and lab: no node needs it.
    "rich": {"cli.controller.status.screen", "lab"},
    "subprocess": {
        "process",
        "builder",
        "installer.bootstrap.registry_process",
        "lab",
    },
    "tenacity": {"retry"},
    "time": {"clocks", "lab"},
    "urllib3": {"kube.transport.official"},
}
# The agent's memory is counted in MiB: a package is allowed once its cost is measured.
# _typeshed is there for type checkers only.
MEASURED = {"yaml", "_typeshed"}


def test_every_import_goes_downwards() -> None:
    assert list(broken_rules(ROOT)) == []


@pytest.mark.parametrize(
    ("path", "source", "finding"),
    [
        ("api/node.py", "import treenail.config.merge", "imports treenail.config.merge"),
        ("host/files.py", "from treenail.api import node", "imports treenail.api"),
        (
            "kube/watch.py",
            "from treenail.host.filesystem.root_directory import Root",
            "imports treenail.host.filesystem.root_directory",
        ),
        ("daemon/loop.py", "import treenail.controllers", "imports treenail.controllers"),
        (
            "controllers/drain.py",
            "import treenail.daemon.reconcile.act",
            "imports treenail.daemon.reconcile.act",
        ),
        ("cli/node/main.py", "import treenail_lab.command", "imports treenail_lab.command"),
        ("errors.py", "from treenail import log", "imports treenail.log"),
        ("api/new.py", "def f():\n    from treenail.kube import client", "imports treenail.kube"),
        ("config/merge.py", "import os.path", "is pure and imports os.path"),
        ("update/plan.py", "from pathlib import Path", "is pure and imports pathlib"),
        ("update/plan.py", "x = datetime.datetime.now()", "is pure and asks the clock"),
        ("config/when.py", "x = date.today()", "is pure and asks the clock"),
        (
            "host/units.py",
            "import subprocess",
            "imports subprocess, which is builder and installer.",
        ),
        ("host/logind.py", "from gi.repository import Gio", "imports gi.repository, which is"),
        ("daemon/act.py", "import time", "imports time, which is"),
        (
            "kube/api_client.py",
            "import kubernetes",
            "imports kubernetes, which is kube.transport.official's",
        ),
        ("daemon/act.py", "import requests", "imports requests, whose memory is not measured"),
        ("host/root.py", "from .files import write", "imports relatively"),
        (
            "host/__init__.py",
            "from treenail.host.filesystem.root_directory import Root",
            "is not empty",
        ),
        ("novelty/thing.py", "", "is in no row"),
        ("registry/client.py", "from treenail.api import pullspec", "imports treenail.api"),
        ("image/oci.py", "from treenail.registry import client", "imports treenail.registry"),
        ("image/compose.py", "import pathlib", "is pure and imports pathlib"),
        ("builder/fetch.py", "from treenail.kube import client", "imports treenail.kube"),
        ("builder/fetch.py", "import treenail.controllers", "imports treenail.controllers"),
        ("controllers/gather.py", "import treenail.host.machine", "imports treenail.host"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, source: str, finding: str) -> None:
    folder = "lab/treenail_lab" if path.startswith("lab/") else "agent/treenail"
    planted = tmp_path / folder / path.removeprefix("lab/")
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    found = list(broken_rules(tmp_path))
    assert len(found) == 1
    assert finding in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "__version__ = '1'"),
        ("daemon/act.py", "from treenail.update import plan\nfrom treenail.host import files"),
        ("config/diff.py", "import json\nfrom treenail.config.merge import merge"),
        ("cli/agent.py", "import treenail.daemon.reconcile.loop\nfrom treenail import __version__"),
        ("builder/push.py", "import subprocess\nfrom treenail.registry import client"),
        ("controllers/image_build/job_builder.py", "from treenail.builder import result"),
        ("lab/demo.py", "import aiohttp, time\nfrom gi.repository import Gio"),
        ("api/decode.py", "import datetime\nimport yaml\nx = datetime.datetime.fromtimestamp(0)"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path: Path, path: str, source: str) -> None:
    folder = "lab/treenail_lab" if path.startswith("lab/") else "agent/treenail"
    planted = tmp_path / folder / path.removeprefix("lab/")
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    assert list(broken_rules(tmp_path)) == []


def test_no_module_and_no_package_imports_in_a_circle() -> None:
    modules = _imports(ROOT)
    assert list(_circles(modules)) == []
    packages = {module[:end] for module in modules for end in _dots(module)}
    for package in sorted(packages):
        assert list(_circles(_group_imports(modules, partial(_room, package)))) == [], package


def test_each_package_has_fifteen_modules_at_most() -> None:
    counts = Counter(
        str(path.parent.relative_to(ROOT))
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.py")
        if path.stem not in {"__init__", "__main__"}
    )
    assert {name: count for name, count in counts.items() if count > MAX_MODULES} == {}


def test_controllers_import_only_what_they_share() -> None:
    modules = _imports(ROOT)
    broken = [
        f"{module} imports {target}"
        for module, targets in sorted(modules.items())
        if module.startswith("controllers.")
        for target in sorted(targets)
        if not _may_import(module.split(".")[1], target)
    ]
    assert broken == []


def _may_import(controller: str, target: str) -> bool:
    own = f"controllers.{controller}."
    allowed = (own, *SHARED_BY_CONTROLLERS, *CONTROLLER_EXCEPTIONS.get(controller, ()))
    return not target.startswith("controllers.") or target.startswith(allowed)


def test_commands_for_clusters_import_nothing_of_the_node_agent() -> None:
    importers = {
        path.name
        for path in (ROOT / "agent/treenail/cli/controller").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith(("treenail.host", "treenail.daemon")) for name in _modules(node))
    }
    assert importers == set()


def _imports(root: Path) -> dict[str, set[str]]:
    """Map each module to its imports, without `treenail.`; the lab's begin with `lab.`."""
    names: dict[str, Path] = {}
    for folder, package in PACKAGES.items():
        prefix = () if package == "treenail" else ("lab",)
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            names[".".join((*prefix, *parts))] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        targets = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                candidates = [*whole, node.module or ""]
            elif isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            else:
                continue
            for candidate in candidates:
                plain = candidate.replace("treenail_lab", "lab", 1).removeprefix("treenail.")
                if plain in names and plain != name:
                    targets.add(plain)
    return found


def _dots(module: str) -> list[int]:
    """Return where the names of the packages around ``module`` end."""
    return [index for index, char in enumerate(module) if char == "."]


def _room(package: str, module: str) -> str | None:
    """Return the part of ``package`` that has the module; None for a module of another one."""
    inside = module.removeprefix(f"{package}.")
    return None if inside == module else inside.split(".")[0]


def _group_imports(
    modules: dict[str, set[str]], group: Callable[[str], str | None]
) -> dict[str, set[str]]:
    """Map each group of modules to the other groups that they import."""
    grouped: dict[str, set[str]] = {}
    for module, targets in modules.items():
        if here := group(module):
            there = {name for target in targets if (name := group(target))}
            grouped.setdefault(here, set()).update(there - {here})
    return grouped


def _circles(imports: dict[str, set[str]]) -> Iterator[str]:
    """Each set of names that reach each other, as one text."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            for target in imports.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reached[name] = seen
    listed: set[str] = set()
    for name in sorted(imports):
        if name in reached[name] and name not in listed:
            circle = {name, *(other for other in reached[name] if name in reached.get(other, ()))}
            listed |= circle
            yield ", ".join(sorted(circle))


def broken_rules(root: Path) -> Iterator[str]:
    """Yield one sentence for each forbidden import."""
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            inside = parts if package == "treenail" else ("lab", *parts)
            for finding in _broken_by(inside, path):
                yield f"{path.relative_to(root)}: {finding}"


def _broken_by(parts: tuple[str, ...], path: Path) -> Iterator[str]:
    if parts in {("__init__",), ("lab", "__init__")}:
        return
    if parts[-1] == "__init__":
        if path.stat().st_size:
            yield "is not empty: a name has one address"
        return
    if parts[0] not in HEIGHT:
        yield f"is in no row: {parts[0]} is none of {', '.join(HEIGHT)}"
        return
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno} imports relatively"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                yield from _broken_import(parts, module)
        elif parts[0] in PURE and _asks_the_clock(node):
            yield f"line {node.lineno} is pure and asks the clock"


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module == "treenail":
        yield from (f"treenail.{alias.name}" for alias in node.names)
    elif node.module is not None:
        yield node.module


def _broken_import(importer: tuple[str, ...], module: str) -> Iterator[str]:
    package, *inner = module.split(".")
    if package == "treenail_lab":
        package, inner = "treenail", ["lab", *inner]
    if package == "treenail":
        if inner and inner[0] != "__version__" and not _downwards(importer[0], inner[0]):
            yield f"imports {module}"
    elif importer[0] in PURE and package in IMPURE_MODULES:
        yield f"is pure and imports {module}"
    elif package in OWNERS:
        if not {importer[0], ".".join(importer)} & OWNERS[package]:
            yield f"imports {module}, which is {' and '.join(sorted(OWNERS[package]))}'s"
    elif package not in sys.stdlib_module_names | MEASURED:
        yield f"imports {module}, whose memory is not measured"


def _downwards(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in ADAPTERS:
        return imported in ADAPTERS_MAY_IMPORT
    if imported in FORBIDDEN.get(importer, ()):
        return False
    return HEIGHT[imported] < HEIGHT[importer] and imported != "lab"


def _asks_the_clock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CALENDAR_READS
        and ast.unparse(node.func.value).split(".")[-1] in {"date", "datetime"}
    )
