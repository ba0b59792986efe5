"""What an administrator may set: /etc/treenail/agent.toml and the command line."""

import logging
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from treenail.api import pullspec
from treenail.daemon.settings.toml_table import Table
from treenail.errors import ConfigError, UsageError
from treenail.update.checks.preflight import Reason
from treenail.update.drift.drift_policy import DriftPolicy, Reaction

T = TypeVar("T")

FILE = "/etc/treenail/agent.toml"

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_NODE_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
)


class Drain(StrEnum):
    """Who sees to it that the node is empty before it reboots."""

    ASK = "ask"
    """A controller, asked through the node's annotations."""
    NEVER = "never"
    """Nobody: the reboot takes the pods down."""


class Backend(StrEnum):
    """What manages the operating system."""

    AUTO = "auto"
    """Whichever of the two is installed; rpm-ostree when both are."""
    RPM_OSTREE = "rpm-ostree"
    BOOTC = "bootc"


class Reboots(StrEnum):
    """What is started anew when the operating system changed."""

    FULL = "full"
    """The machine."""
    AUTO = "auto"
    """User space alone, where the kernel, its arguments and its initramfs stay."""


class ImageFiles(StrEnum):
    """Where a node in image mode has its config's files and units from."""

    BAKED = "baked"
    """From the image; one that says it was built from another config is refused."""
    WRITE = "write"
    """From the agent, as outside image mode: for images that bake nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, and how often they are tried."""

    stage_s: float = 3600.0
    """Fetching and staging an image, in all."""
    stall_s: float = 600.0
    """Staging without any progress."""
    drain_s: float = 3600.0
    """A drain, before its delay is complained about."""
    call_s: float = 30.0
    """One call to D-Bus or the API server."""
    retry_first_s: float = 5.0
    """From a failure to the next try; twice as long after each further one."""
    retry_most_s: float = 300.0
    """The longest time between two tries."""
    look_s: float = 60.0
    """How often to look at everything when nothing says that there is reason to."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How long a node that was rebooted into its target may take to be healthy, in seconds."""

    deadline_s: float = 600.0
    """From the agent's start after the boot until the node goes back."""
    settle_s: float = 10.0
    """How long everything has to be well without a break."""
    check_s: float = 30.0
    """One of the owner's checks."""
    again_s: float = 5.0
    """From one look to the next."""
    keep_s: float = 86_400.0
    """How long the previous deployment is kept after that."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is looked at before an update begins."""

    registry_s: float = 60.0
    """How long the registry may take to say what the image is."""
    only_warn: frozenset[Reason] = frozenset()
    """The reasons that are said and hold nothing up."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """How drift is looked for, and what it leads to."""

    default: Reaction = Reaction.BLOCK
    paths: tuple[tuple[str, Reaction], ...] = ()
    """The first glob that matches decides."""
    heals_per_hour: int = 3
    full_every_s: float = 600.0
    """From one look at everything to the next; what is touched is looked at within seconds."""

    @property
    def policy(self) -> DriftPolicy:
        return DriftPolicy(self.default, self.paths, self.heals_per_hour)


@dataclass(frozen=True, slots=True)
class FirstBoot:
    """What a node moves to before it joins its cluster."""

    image: str = ""
    """The pull spec, by digest; empty leaves it to the config that the node was given."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the file, or the command line, says; None where it says nothing."""

    kubeconfig: str | None = None
    node_name: str | None = None
    root: str | None = None
    pull_secret: str | None = None
    internal_pull_secret: str | None = None
    drain: Drain | None = None
    image_files: ImageFiles | None = None
    backend: Backend | None = None
    reboot: Reboots | None = None
    log_level: int | None = None
    limits: Limits = Limits()
    health: Trial = Trial()
    preflight: Preflight = Preflight()
    firstboot: FirstBoot = FirstBoot()
    drift: DriftSettings = DriftSettings()


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its value; all paths but ``root`` are below the root."""

    kubeconfig: str
    node_name: str
    root: str
    pull_secret: str
    """The cluster's pull secret."""
    internal_pull_secret: str
    """The pull secret of the cluster's own registry; the file may well be missing."""
    drain: Drain
    image_files: ImageFiles
    backend: Backend
    reboot: Reboots
    log_level: int
    limits: Limits
    health: Trial = Trial()
    preflight: Preflight = Preflight()
    firstboot: FirstBoot = FirstBoot()
    drift: DriftSettings = DriftSettings()


def load(path: Path, arguments: Given, *, host_name: str, required: bool) -> Settings:
    """The settings of the file, with those of the command line over them.

    A file that is missing says nothing, unless it is ``required``. Raises `UsageError` with the
    key, what was found and what is allowed.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if required:
            raise UsageError(f"there is no {path}", remedy="name a file that exists") from error
        return merged(Given(), arguments, host_name=host_name)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    return merged(parse(content, where=str(path)), arguments, host_name=host_name)


def parse(content: bytes, *, where: str) -> Given:
    """What the TOML document says; raises `UsageError` that starts with ``where``."""
    import tomllib  # noqa: PLC0415 - 1 MiB, and most nodes have no such file

    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML: {error}") from error
    table = Table(document, where=where)
    given = Given(
        kubeconfig=table.text("kubeconfig"),
        node_name=table.text("node_name"),
        root=table.text("root"),
        pull_secret=table.text("pull_secret"),
        internal_pull_secret=table.text("internal_pull_secret"),
        drain=table.choice("drain", {str(drain): drain for drain in Drain}),
        image_files=table.choice("image_files", {str(each): each for each in ImageFiles}),
        backend=table.choice("backend", {str(backend): backend for backend in Backend}),
        reboot=table.choice("reboot", {str(each): each for each in Reboots}),
        log_level=table.choice("log_level", _LEVELS),
        limits=_limits(table.table("limits")),
        health=_trial(table.table("health")),
        preflight=_preflight(table.table("preflight")),
        firstboot=_first_boot(table.table("firstboot"), where=where),
        drift=_drift(table.table("drift")),
    )
    table.refuse_the_rest()
    return given


def merged(file: Given, arguments: Given, *, host_name: str) -> Settings:
    """The command line before the file, the file before the defaults."""
    settings = Settings(
        kubeconfig=_first(arguments.kubeconfig, file.kubeconfig, "/var/lib/kubelet/kubeconfig"),
        node_name=_first(arguments.node_name, file.node_name, host_name.lower()),
        root=_first(arguments.root, file.root, "/"),
        pull_secret=_first(arguments.pull_secret, file.pull_secret, "/var/lib/kubelet/config.json"),
        internal_pull_secret=_first(
            arguments.internal_pull_secret,
            file.internal_pull_secret,
            "/etc/mco/internal-registry-pull-secret.json",
        ),
        drain=_first(arguments.drain, file.drain, Drain.ASK),
        image_files=_first(arguments.image_files, file.image_files, ImageFiles.BAKED),
        backend=_first(arguments.backend, file.backend, Backend.AUTO),
        reboot=_first(arguments.reboot, file.reboot, Reboots.FULL),
        log_level=_first(arguments.log_level, file.log_level, logging.INFO),
        limits=file.limits,
        health=file.health,
        preflight=file.preflight,
        firstboot=file.firstboot,
        drift=file.drift,
    )
    for key in ("kubeconfig", "root", "pull_secret", "internal_pull_secret"):
        value: str = getattr(settings, key)
        if not value.startswith("/") or "\0" in value:
            raise UsageError(f"{key} is {value!r}; allowed is an absolute path")
    if not _NODE_NAME.fullmatch(settings.node_name):
        raise UsageError(
            f"node_name is {settings.node_name!r}; allowed is the name of a Node: lower-case "
            "letters, digits, - and .",
            remedy="set node_name, or the host name, to the name that the kubelet registers",
        )
    return settings


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _limits(table: Table) -> Limits:
    default = Limits()
    limits = Limits(
        stage_s=table.seconds("stage_s", default.stage_s),
        stall_s=table.seconds("stall_s", default.stall_s),
        drain_s=table.seconds("drain_s", default.drain_s),
        call_s=table.seconds("call_s", default.call_s),
        retry_first_s=table.seconds("retry_first_s", default.retry_first_s),
        retry_most_s=table.seconds("retry_most_s", default.retry_most_s),
        look_s=table.seconds("look_s", default.look_s),
    )
    table.refuse_the_rest()
    if limits.retry_first_s > limits.retry_most_s:
        raise table.refused(
            "retry_first_s", limits.retry_first_s, f"at most retry_most_s, {limits.retry_most_s:g}"
        )
    return limits


def _trial(table: Table) -> Trial:
    default = Trial()
    trial = Trial(
        deadline_s=table.seconds("deadline_s", default.deadline_s),
        settle_s=table.seconds("settle_s", default.settle_s),
        check_s=table.seconds("check_s", default.check_s),
        again_s=table.seconds("again_s", default.again_s),
        keep_s=table.seconds("keep_s", default.keep_s),
    )
    table.refuse_the_rest()
    return trial


def _preflight(table: Table) -> Preflight:
    default = Preflight()
    preflight = Preflight(
        registry_s=table.seconds("registry_s", default.registry_s),
        only_warn=frozenset(table.choices("only_warn", {str(each): each for each in Reason})),
    )
    table.refuse_the_rest()
    return preflight


def _drift(table: Table) -> DriftSettings:
    default = DriftSettings()
    reactions = {str(each): each for each in Reaction}
    paths = table.table("paths")
    drift = DriftSettings(
        default=_first(table.choice("default", reactions), default.default),
        paths=tuple((glob, _first(paths.choice(glob, reactions))) for glob in paths.names()),
        heals_per_hour=table.count("heals_per_hour", default.heals_per_hour),
        full_every_s=table.seconds("full_every_s", default.full_every_s),
    )
    table.refuse_the_rest()
    return drift


def _first_boot(table: Table, *, where: str) -> FirstBoot:
    image = table.text("image") or ""
    table.refuse_the_rest()
    if image:
        try:
            pullspec.parse(image, where=f"{where}: firstboot.image")
        except ConfigError as error:
            raise UsageError(str(error), remedy=error.remedy) from error
    return FirstBoot(image)
