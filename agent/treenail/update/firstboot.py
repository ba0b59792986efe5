"""Decide the next action at first boot, before the machine joins its cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from treenail import deployment_change, errors
from treenail.api import annotations as key
from treenail.api import machineconfig, pullspec
from treenail.config import node_paths, wanted_state
from treenail.encoding import codec
from treenail.update.impact import os_change

Json = dict[str, object]

_VERSION = 1

REBOOTS_ALLOWED = 3
"""Reboots into the target, after which a user must act: it was not finalized, or not booted."""
REBOOTS_WITHOUT_TRACE = 10
"""The same, if neither libostree nor the boot loader failed: power cuts leave no trace."""


@dataclass(frozen=True, slots=True)
class FirstBootClaim:
    """The config and image that the annotations of a new machine report; empty without these."""

    config: str = ""
    """The name of the rendered config."""
    image: str = ""
    """The image beside the config; empty outside image mode."""
    image_files: str = ""
    """``baked`` or ``write``; empty leaves the choice to the settings."""


@dataclass(frozen=True, slots=True)
class FirstBootTarget:
    """The target of the first boot; empty if nothing is requested."""

    config: machineconfig.MachineConfig | None = None
    """The config that the machine was provisioned with."""
    image: str = ""
    """The image in the settings or the annotations, which takes precedence over the config's."""


@dataclass(frozen=True, slots=True)
class FirstBootProgress:
    """The progress of earlier boots."""

    reboot_count: Annotated[int, codec.Key("rebootCount")] = 0
    boot_id: Annotated[str, codec.Key("bootID")] = ""
    """The boot in which the last reboot was requested."""
    staged_id: Annotated[str, codec.Key("stagedID")] = ""
    """The deployment for the reboot."""


@dataclass(frozen=True, slots=True)
class FirstBootReady:
    """The machine can join its cluster."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstBootStage:
    """Stage the change and reboot into it."""

    change: deployment_change.DeploymentChange


def read_claim(annotations: Mapping[str, str]) -> FirstBootClaim:
    """Return what the annotations claim that the machine has."""
    images = (annotations.get(spelling, "") for spelling in key.IMAGE_SPELLINGS.values())
    return FirstBootClaim(
        annotations.get(key.CURRENT_CONFIG, ""),
        next(filter(None, images), ""),
        annotations.get(key.IMAGE_FILES, ""),
    )


def select_target(
    config: machineconfig.MachineConfig | None, claim: FirstBootClaim, *, image: str
) -> FirstBootTarget:
    """Return the target; ``image`` is the one in the settings, which takes precedence.

    Raises `ConfigError` when config and annotations contradict each other, or when the image of
    the annotations has no digest.
    """
    if config is not None and claim.config and config.name != claim.config:
        raise make_contradiction_error(
            f"{node_paths.ENCAPSULATED_CONFIG} is of {config.name}, and "
            f"{node_paths.FIRST_BOOT_ANNOTATIONS} names {claim.config}"
        )
    if image or not claim.image:
        return FirstBootTarget(config, image)
    pullspec.parse_pull_spec(claim.image, where=node_paths.FIRST_BOOT_ANNOTATIONS)
    named = config.os_image_url if config is not None else ""
    if named and named.partition("@")[2] != claim.image.partition("@")[2]:
        raise make_contradiction_error(
            f"{node_paths.ENCAPSULATED_CONFIG} names the image {named}, and "
            f"{node_paths.FIRST_BOOT_ANNOTATIONS} names {claim.image}"
        )
    return FirstBootTarget(config, claim.image)


def make_contradiction_error(cause: str) -> errors.ConfigError:
    """Return the error for files of one provisioning that contradict each other."""
    return errors.ConfigError(
        f"cannot verify the first boot: {cause}",
        remedy="install the machine again, with user data of one config server",
    )


def decide_first_boot(
    target: FirstBootTarget,
    deployments: os_change.DeploymentState,
    progress: FirstBootProgress,
    *,
    fips: bool,
    boot_id: str,
    architecture: str,
    finalization_error: str = "",
    is_deployed: bool = False,
) -> FirstBootReady | FirstBootStage:
    """Return the next action.

    ``is_deployed``: the deployment of the last reboot was finalized, and is not booted.

    Raises `UnreconcilableError` for a change that needs a new installation, `ConfigError` for an
    invalid config, and `HostError` if the reboots did not boot the target.
    """
    config = target.config
    if config is not None and config.fips != fips:
        raise errors.UnreconcilableError(
            f"cannot turn FIPS mode {'on' if config.fips else 'off'}: it is set at installation",
            remedy=f"install the machine again with fips={int(config.fips)} on the kernel command "
            "line",
        )
    wanted = (
        wanted_state.read_wanted_state(config).os if config is not None else wanted_state.WantedOS()
    )
    if not target.image:
        os_change.check_kernel_type(wanted, architecture)
    change = os_change.compute_os_change(
        wanted_state.WantedOS(), wanted, deployments, image=target.image
    )
    if change.is_empty:
        return FirstBootReady("the target is booted")
    has_failed = is_deployed or bool(finalization_error)
    limit = REBOOTS_ALLOWED if has_failed else REBOOTS_WITHOUT_TRACE
    if progress.reboot_count >= limit and progress.boot_id != boot_id:
        why = f"; ostree-finalize-staged failed: {finalization_error}" if finalization_error else ""
        raise errors.HostError(
            f"cannot boot the target of the first boot: {progress.reboot_count} reboots booted "
            f"another deployment{why}",
            remedy="read the cause with: journalctl -b -1 -u ostree-finalize-staged; then run: rm "
            "/var/lib/treenail/firstboot.json, and: systemctl restart treenail-firstboot",
        )
    return FirstBootStage(change)


def to_json(progress: FirstBootProgress) -> Json:
    """Return the JSON document of the progress."""
    return codec.encode(progress, version=_VERSION)


def from_json(document: object) -> FirstBootProgress:
    """Return the progress in ``document``; a document that cannot be read counts as none."""
    try:
        return codec.decode(FirstBootProgress, document, version=_VERSION)
    except codec.CodecError:
        return FirstBootProgress()
