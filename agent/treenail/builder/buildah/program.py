"""buildah: its storage, the commands of a build, and their output.

It runs in namespaces and in a root directory of its own, because a RUN can leave the directory that
buildah's chroot isolation gives it. Its root has subordinate IDs::

    WORK/buildah   storage, run and temporary files of buildah: what a RUN may reach and change
    WORK/given     the text, private copies of its files, and the configuration: read-only
    WORK/layout    only while an image is loaded, read-only
    WORK/saved     only while an image is saved
"""

import getpass
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treenail import clocks, errors, sanitize
from treenail.builder import failures
from treenail.builder.buildah import sandbox, stored_tree

_WANTED_IDS = 65536  # UIDs of 16 bits are what images use
_OWN_FIRST_ID = 0x7F000000
"""First of the IDs of builds as root, unless /etc/subuid has a range for root: in a range that no
system or container manager uses (systemd, docs/UIDS-GIDS.md)."""


@dataclass(frozen=True, slots=True)
class IdMaps:
    """Maps for /proc/PID/uid_map and gid_map, lines separated by commas, and who writes them."""

    uid_map: str
    gid_map: str
    way: str

    @property
    def root(self) -> tuple[int, int]:
        """UID and GID outside of the root inside."""
        return int(self.uid_map.split()[1]), int(self.gid_map.split()[1])


def choose_own_id_maps() -> IdMaps:
    """Choose the maps of this process's user as `choose_id_maps` does."""
    user = os.geteuid()
    # A system without /etc/passwd has root, too.
    name = "root" if user == 0 else getpass.getuser()
    return choose_id_maps(user, name, os.getegid(), proc=Path("/proc"), etc=Path("/etc"))


def choose_id_maps(user_id: int, user_name: str, group_id: int, *, proc: Path, etc: Path) -> IdMaps:
    """Choose the ID maps for a build by this user.

    Root uses a range of its own, in a container with few IDs all but the first. Another user needs
    subordinate IDs and the programs newuidmap and newgidmap. Raises `HostError` with the remedy.
    """
    if user_id == 0:
        # A process with CAP_SETUID may map any IDs of its own namespace, and only those
        # (user_namespaces(7)): a nested namespace has no more than the outer one.
        uid_map, gid_map = (
            _choose_root_map(_read_text(etc / sub), (proc / f"self/{own}").read_text(), own)
            for sub, own in (("subuid", "uid_map"), ("subgid", "gid_map"))
        )
        return IdMaps(uid_map, gid_map, sandbox.DIRECT)
    if shutil.which("newuidmap") is None or shutil.which("newgidmap") is None:
        raise errors.HostError(
            "cannot build as a user other than root: newuidmap is not installed",
            remedy="install the package uidmap (Debian) or shadow-utils (Fedora), or build as root",
        )
    maps = []
    for file, own in (("subuid", user_id), ("subgid", group_id)):
        first, count = find_subordinate_ids(_read_text(etc / file), user_id, user_name)
        if count < _WANTED_IDS:
            raise errors.HostError(
                f"cannot build as user {user_name}: expected {_WANTED_IDS} subordinate IDs in "
                f"{etc / file}, found {count}",
                remedy=f"run as root: usermod --add-subuids 100000-165535 --add-subgids "
                f"100000-165535 {user_name}",
            )
        # root inside is the user outside, and all other IDs are subordinate ones, as in rootless
        # podman.
        maps.append(f"0 {own} 1,1 {first} {count}")
    return IdMaps(maps[0], maps[1], sandbox.NEWUIDMAP)


def _choose_root_map(subordinate: str, own: str, name: str) -> str:
    first, count = find_subordinate_ids(subordinate, 0, "root")
    if count < _WANTED_IDS:
        first = _OWN_FIRST_ID
    count = count_own_ids(own)
    if first + _WANTED_IDS <= count:
        return f"0 {first} {_WANTED_IDS}"
    # No image needs the ID that is missing, 65535.
    if count < _WANTED_IDS:
        raise errors.HostError(
            f"cannot build as root: expected {_WANTED_IDS} IDs in /proc/self/{name}, found {count}",
            remedy="build on the host, or give the container more IDs, such as with: "
            "podman run --uidmap 0:100000:65536 --gidmap 0:100000:65536",
        )
    return f"0 1 {min(count - 1, _WANTED_IDS)}"


def count_own_ids(text: str) -> int:
    """Count the IDs from 0 on, without a gap, in a file like /proc/self/uid_map."""
    count = 0
    for inside, _, length in sorted(
        tuple(map(int, line.split())) for line in text.splitlines() if line.strip()
    ):
        if inside != count:
            break
        count = inside + length
    return count


def find_subordinate_ids(text: str, user_id: int, user_name: str) -> tuple[int, int]:
    """Return the first ID and the count of the user's longest range in /etc/subuid (5)."""
    # An owner is a login name or a UID, in subgid too (subgid(5)); a user may have several lines.
    ranges = [(0, 0)]
    for line in text.splitlines():
        owner, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if owner in {user_name, str(user_id)} and first.isdigit() and count.isdigit():
            ranges.append((int(first), int(count)))
    return max(ranges, key=lambda pair: pair[1])


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


TAIL_LINES = 40
_TAIL_LINE_LIMIT = 400  # characters
# Steps of several stages are prefixed with the number of the stage: `[1/2] STEP 2/5: RUN make`.
_STEP = re.compile(r"(?:\[(\d+)/\d+\] )?STEP (\d+)/\d+: (\w+)")

StepLines = Mapping[tuple[int, int], int]
"""Line of the Containerfile by stage and step, both counted from 1 as buildah counts them."""


class BuildOutput:
    """Collects the output of a build line by line."""

    def __init__(self, lines: StepLines, show_line: Callable[[str], None]) -> None:
        """``show_line`` receives each line, escaped and without credentials."""
        self._lines = lines
        self._show_line = show_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._step = (1, 0)

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._tail)

    @property
    def line(self) -> int:
        """Line of the current instruction; 0 before the first one."""
        return self._lines.get(self._step, 0)

    def add_line(self, text: str) -> None:
        """Add a line of standard output or standard error."""
        line = sanitize.escape_line(sanitize.sanitize_text(text, limit=_TAIL_LINE_LIMIT))
        if not line:
            return
        self._tail.append(line)
        self._follow_step(line)
        self._show_line(line)

    def _follow_step(self, line: str) -> None:
        """Advance to the next step; a program of a ``RUN`` may print such lines too."""
        if step := _STEP.match(line):
            position = (int(step[1] or 1), int(step[2]))
            if position > self._step and position in self._lines:
                self._step = position


GIVEN, AREA, _LAYOUT = "given", "buildah", "layout"
_CHUNK = 64 * 1024
_LINE_LIMIT = 16 * 1024  # bytes; a longer line is split
_SANDBOX = Path(sandbox.__file__)
# What a program of the build may need of the environment: the way to the network, and nothing else.
_PASSED_VARIABLES = (
    "PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BindMount:
    """A directory that a program sees at ``target``."""

    source: Path
    target: str
    is_writable: bool = False


class SandboxedProgram:
    """Runs a program in user, PID, mount and IPC namespaces; nothing of it survives the run.

    It sees the system's programs and the directories of its run, and no other file of the host.
    """

    def __init__(
        self,
        clock: clocks.Clock,
        id_maps: IdMaps,
        environ: Mapping[str, str],
        *,
        directory: Path | None = None,
    ) -> None:
        """``environ`` is the whole environment of the program: see `make_environment`.

        ``directory`` contains what its runs may see.
        """
        self.root = id_maps.root
        self._directory = directory
        self._clock = clock
        self._id_maps = id_maps
        self._environ = dict(environ)

    def run_program(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        add_line: Callable[[str], None],
        mounts: Sequence[BindMount] = (),
    ) -> int:
        """Run the program; return its exit code, or 128 and the number of a signal.

        ``add_line`` receives each line of both outputs. ``mounts`` have paths below the directory,
        and the program begins in the first one. Raises `CommandTimeoutError` after
        ``timeout_s`` seconds, and `CommandError` where the namespaces cannot be created. The
        program and all its child processes have ended when this returns or raises.
        """
        deadline = self._clock.monotonic() + timeout_s
        maps = self._id_maps
        # Without site-packages and the environment: starts in 20 ms.
        interpreter = [sys.executable, "-I", "-S", str(_SANDBOX)]
        shown: list[str] = []
        for mount in mounts:
            source = os.path.relpath(mount.source, self._directory)
            shown += ["rw" if mount.is_writable else "ro", source, mount.target]
        program = subprocess.Popen(
            [*interpreter, maps.uid_map, maps.gid_map, maps.way, *shown, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # One pipe keeps the order: buildah prints steps on standard output and errors on the
            # other.
            stderr=subprocess.STDOUT,
            env=self._environ,
            cwd=self._directory,
            start_new_session=True,
        )
        problems: list[str] = []

        def add_program_line(line: str) -> None:
            if line.startswith(sandbox.MESSAGE_PREFIX):
                problems.append(line.removeprefix(sandbox.MESSAGE_PREFIX))
            else:
                add_line(line)

        with program:
            try:
                self._follow_output(program, argv[0], deadline, add_program_line)
                program.wait(max(1.0, deadline - self._clock.monotonic()))
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                raise errors.CommandTimeoutError(
                    f"{argv[0]} did not exit within {timeout_s:g} s"
                ) from error
            finally:
                # The first process of the session: its death ends all others.
                # start_new_session made its ID also that of its process group (setsid(2)).
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        if program.returncode == sandbox.EXIT_NO_NAMESPACE and problems:
            raise errors.CommandError(
                f"cannot run {argv[0]}: {problems[0]}",
                remedy="allow user namespaces here: a container needs runAsUser 0, its default "
                "capabilities and a seccomp profile that permits unshare; "
                "on a host run: sysctl user.max_user_namespaces=65536",
            )
        return program.returncode if program.returncode >= 0 else 128 - program.returncode

    def _follow_output(
        self,
        program: "subprocess.Popen[bytes]",
        name: str,
        deadline: float,
        add_line: Callable[[str], None],
    ) -> None:
        if program.stdout is None:
            raise errors.CommandError(f"cannot read the output of {name}")
        rest = b""
        with selectors.DefaultSelector() as readable:
            readable.register(program.stdout, selectors.EVENT_READ)
            while True:
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                if not readable.select(min(left_s, 60.0)):
                    continue
                chunk = os.read(program.stdout.fileno(), _CHUNK)
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE_LIMIT:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    add_line(line.decode("utf-8", "replace"))
                if not chunk:
                    break
        if rest:
            add_line(rest.decode("utf-8", "replace"))


def make_environment(environ: Mapping[str, str], work: Path) -> dict[str, str]:
    """Make the environment of buildah: proxies and directories, and no variable besides."""
    home, area = work / GIVEN / "home", work / AREA
    passed = {name: environ[name] for name in _PASSED_VARIABLES if name in environ}
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        **passed,
        "HOME": str(home),
        # Layers may need much space below TMPDIR; the default is /var/tmp (buildah-build(1)).
        "TMPDIR": str(area / "tmp"),
        # Without root the default of run files is below /run/user/UID (buildah(1)), which a
        # container does not have.
        "XDG_RUNTIME_DIR": str(area / "run"),
        # containers.conf(5) of the user is searched here, and there is none.
        "XDG_CONFIG_HOME": str(home),
        # Replaces /etc/containers/storage.conf and the file in the home directory.
        "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
        # No login, wherever buildah would look for one (containers-auth.json(5)).
        "REGISTRY_AUTH_FILE": os.devnull,
        # `classify` matches English texts.
        "LC_ALL": "C.UTF-8",
    }


_STORE_TIMEOUT_S = 1800.0
_IMAGE_ID = re.compile(r"[0-9a-f]{64}")
_LOCAL_PREFIX = "localhost/treenail-"
# buildah accepts no image without a policy file, not even a local one.
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}\n'
# A short name is an error, not a search in several registries (registries.conf(5)).
_REGISTRIES = 'unqualified-search-registries = []\nshort-name-mode = "enforcing"\n'


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files of one run of ``buildah bud``."""

    containerfile: Path
    context: Path


class Buildah:
    """Runs buildah with storage in the work directory, which only this user may search."""

    built_image = f"{_LOCAL_PREFIX}built"
    """Local name of the complete image."""
    own_image = f"{_LOCAL_PREFIX}configs"
    """Local name of the image of our own part of the Containerfile."""

    def __init__(self, program: SandboxedProgram, work: Path, driver: str) -> None:
        self._program = program
        self._work = work
        self.driver = driver
        self.given = work / GIVEN
        self.storage = work / AREA / "storage"

    def prepare_work(self) -> None:
        """Create the directories and the configuration; nothing of /etc/containers counts."""
        area, home = self._work / AREA, self.given / "home"
        try:
            for path in (home, self.given / _LAYOUT, area / "tmp"):
                path.mkdir(parents=True, exist_ok=True)
            self._give(area, area / "tmp")
            (home / "storage.conf").write_text(
                f'[storage]\ndriver = "{self.driver}"\n'
                f'graphroot = "{self.storage}"\nrunroot = "{area}/run"\n'
            )
            # The images come from the layout only, where `fetch` verified each digest.
            (home / "policy.json").write_text(_POLICY)
            (home / "registries.conf").write_text(_REGISTRIES)
        except OSError as error:
            raise errors.FileError(f"cannot write {error.filename}: {error.strerror}") from error

    def load_image(self, layout: Path, name: str) -> str:
        """Load an image of the layout, which is in the work directory; return its ID."""
        image_id = ""

        def read_id(line: str) -> None:
            nonlocal image_id
            if _IMAGE_ID.fullmatch(line):
                image_id = line

        self._run_store_command(
            ["pull", "--quiet", f"--signature-policy={self.given}/home/policy.json",
             f"oci:{_LAYOUT}:{name}"],
            read_id,
            BindMount(layout, f"{self.given}/{_LAYOUT}"),
        )  # fmt: skip
        if not image_id:
            raise errors.CommandError("cannot load an image: buildah pull printed no image ID")
        stored_tree.create_mount_points(self.storage, self.driver, image_id)
        return image_id

    def tag_image(self, image_id: str, name: str) -> None:
        """Name an image: buildah writes names of bases, such as the layout's path, into images."""
        self._run_store_command(["tag", image_id, f"{_LOCAL_PREFIX}{name}"])

    def list_image_ids(self) -> list[str]:
        """List the IDs of all images of the storage, those of single instructions too."""
        image_ids: list[str] = []
        self._run_store_command(
            ["images", "--all", "--quiet", "--no-trunc"],
            # With --no-trunc the IDs have this prefix, unlike those that `pull --quiet` prints.
            lambda line: image_ids.append(line.removeprefix("sha256:")),
        )
        return list(
            dict.fromkeys(image_id for image_id in image_ids if _IMAGE_ID.fullmatch(image_id))
        )

    def save_image(self, image: str, layout: Path, name: str) -> None:
        """Write an image of the storage into the layout; blobs that the layout has stay.

        It is in the work directory, and has nothing that a RUN must not change.
        """
        self._give(layout, *layout.rglob("*"))
        self._run_store_command(
            ["push", "--quiet", f"--signature-policy={self.given}/home/policy.json",
             "--format=oci", image, f"oci:{_LAYOUT}:{name}"],
            mount=BindMount(layout, f"{self.given}/{_LAYOUT}", is_writable=True),
        )  # fmt: skip

    def build_image(
        self,
        files: TextFiles,
        image: str,
        *,
        images: Mapping[str, str],
        mounts: Sequence[BindMount],
        keeps_layers: bool,
        architecture: str,
        timeout_s: float,
        add_line: Callable[[str], None],
    ) -> int:
        """Build the Containerfile as the local image ``image``; return buildah's exit code.

        ``images`` maps image names of the text to names of `tag_image`. Raises
        `CommandTimeoutError` after ``timeout_s``.
        """
        # A context named like an image replaces it in FROM, COPY --from and RUN --mount, so that
        # buildah asks no registry (buildah-build(1), --build-context).
        contexts = [
            f"--build-context={reference}=container-image://{_LOCAL_PREFIX}{name}"
            for reference, name in images.items()
        ]
        volumes = [f"--volume={mount.source}:{mount.target}:ro" for mount in mounts]
        # chroot isolation needs no OCI runtime and no cgroups, so it works within a container.
        # --timestamp=0 gives equal builds an equal digest, --pull=never forbids the network to
        # buildah itself, and --layers commits an image after each instruction, which the cache
        # needs (buildah-build(1)).
        return self._run(
            [*self._make_command("bud"), "--isolation=chroot", "--timestamp=0", "--pull=never",
             "--format=oci", f"--signature-policy={self.given}/home/policy.json",
             f"--layers={str(keeps_layers).lower()}", f"--arch={architecture}",
             *contexts, *volumes, f"--tag={image}",
             f"--file={files.containerfile}", str(files.context)],
            timeout_s=timeout_s,
            add_line=add_line,
        )  # fmt: skip

    def _make_command(self, command: str) -> list[str]:
        return [
            "buildah",
            f"--root={self.storage}",
            f"--runroot={self._work}/{AREA}/run",
            f"--storage-driver={self.driver}",
            f"--registries-conf={self.given}/home/registries.conf",
            command,
        ]

    def _run_store_command(
        self,
        arguments: Sequence[str],
        add_line: Callable[[str], None] = lambda _: None,
        mount: BindMount | None = None,
    ) -> None:
        lines: list[str] = []

        def collect_line(line: str) -> None:
            del lines[:-20]
            lines.append(line)
            add_line(line)

        command, *rest = arguments
        argv = [*self._make_command(command), *rest]
        mounts = [] if mount is None else [mount]
        code = self._run(argv, mounts, timeout_s=_STORE_TIMEOUT_S, add_line=collect_line)
        if code:
            cause = failures.find_error(lines) or "\n".join(lines[-3:]) or f"exit code {code}"
            raise errors.CommandError(f"buildah {command} failed: {cause}", stderr="\n".join(lines))

    def _run(
        self,
        argv: Sequence[str],
        mounts: Sequence[BindMount] = (),
        *,
        timeout_s: float,
        add_line: Callable[[str], None],
    ) -> int:
        area = self._work / AREA
        shown = [
            # buildah derives a name for an image from the path of its layout, and rejects a path
            # that no image can have as name. So the path is relative to this first directory.
            BindMount(self.given, str(self.given)),
            BindMount(area, str(area), is_writable=True),
            *mounts,
        ]
        # The owner is part of the digest of a COPY.
        self._give(self.given, *self.given.rglob("*"))
        return self._program.run_program(argv, timeout_s=timeout_s, add_line=add_line, mounts=shown)

    def _give(self, *paths: Path) -> None:
        """Give files to the root of the sandbox."""
        try:
            for path in paths if os.geteuid() == 0 else ():
                os.chown(path, *self._program.root, follow_symlinks=False)
        except OSError as error:
            raise errors.FileError(
                f"cannot change the owner of {error.filename}: {error.strerror}"
            ) from error
