"""The change of the operating system that a config requires, and whether it is booted."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treenail import deployment_change, errors
from treenail.api import machineconfig, pullspec
from treenail.config import diff, wanted_state

KERNEL_KEEPING_ASPECTS = frozenset({diff.OSAspect.IMAGE, diff.OSAspect.EXTENSIONS})
"""The aspects that can change without another kernel."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The part of the deployments that decisions depend on; unknown digests are empty.

    The back ends report an `OstreeDeployment` for each one; this has the kernel arguments, too, and
    of the staged deployment only what names it.
    """

    booted_digest: str
    """The manifest digest of the booted image; empty if it has none."""
    kernel_arguments: tuple[str, ...] = ()
    """The kernel arguments that are booted."""
    packages: tuple[str, ...] = ()
    """The packages that are layered on the booted image."""
    removed_packages: tuple[str, ...] = ()
    """The packages of the booted image that are removed by an override."""
    booted_list_digest: str = ""
    """The digest of the manifest list that named the booted image; empty without one."""
    booted_id: str = ""
    """The booted deployment; empty when the back end names none."""
    is_booted_pinned: bool = False
    """The booted deployment is pinned, so that no program can drop it."""
    staged_digest: str = ""
    staged_list_digest: str = ""
    """The same of the staged image."""
    staged_id: str = ""
    """The staged deployment; not empty whenever something is staged."""
    is_locked: bool = False
    other_ids: tuple[str, ...] = ()
    """The deployments that are neither booted nor staged."""
    pending_id: str = ""
    """The deployment, staged or not, that the next boot selects instead of the booted one."""
    machine_arguments: Mapping[str, int] = field(default_factory=dict)
    """How often the machine had kernel arguments before a config added them, where it is known."""

    def has_booted(self, digest: str) -> bool:
        """Return whether the image with this digest of a manifest or manifest list is booted."""
        return digest != "" and digest in {self.booted_digest, self.booted_list_digest}

    def has_staged(self, digest: str) -> bool:
        """Return whether the image with this digest of a manifest or manifest list is staged."""
        return digest != "" and digest in {self.staged_digest, self.staged_list_digest}


def list_aspects(change: deployment_change.DeploymentChange) -> tuple[diff.OSAspect, ...]:
    """Return the fields of a MachineConfig that require the change."""
    kernels = frozenset[str]().union(*machineconfig.KERNEL_PACKAGES.values())
    packages = {*change.install_packages, *change.uninstall_packages}
    aspects = (
        (diff.OSAspect.IMAGE, change.image),
        (diff.OSAspect.KERNEL_ARGUMENTS, change.append_kargs or change.delete_kargs),
        (
            diff.OSAspect.KERNEL_TYPE,
            change.override_remove or change.override_reset or packages & kernels,
        ),
        (diff.OSAspect.EXTENSIONS, packages - kernels),
    )
    return tuple(aspect for aspect, differs in aspects if differs)


def can_keep_kernel(change: deployment_change.DeploymentChange) -> bool:
    """Return whether it may keep the running kernel; only the deployment shows whether it does."""
    return set(list_aspects(change)) <= KERNEL_KEEPING_ASPECTS and not change.is_empty


def compute_os_change(
    old: wanted_state.WantedOS, new: wanted_state.WantedOS, booted: DeploymentState, *, image: str
) -> deployment_change.DeploymentChange:
    """Return the change from the old to the new OS; empty if the new one is booted.

    ``image`` is requested beside the config and contains its packages and its kernel. Raises
    `ConfigError` when the config does not name its image by digest.
    """
    edit = deployment_change.compute_edit(
        count_machine_arguments(old, new, booted), new.kernel_arguments, booted.kernel_arguments
    )
    before, after = (
        wanted_state.list_packages(old),
        frozenset[str]() if image else wanted_state.list_packages(new),
    )
    removed = frozenset[str]() if image else _list_removed_packages(new)
    new_image = _select_image(image or new.image, booted)
    install = after - set(booted.packages)
    if not new_image:
        # An earlier release layered the extension without them: they come with the next image.
        install -= before & wanted_state.LATER_PACKAGES
    change = replace(
        edit,
        image=new_image,
        install_packages=_sort_names(install),
        uninstall_packages=_sort_names((before - after) & set(booted.packages)),
        override_remove=_sort_names(removed - set(booted.removed_packages)),
        override_reset=_sort_names(
            (_list_removed_packages(old) - removed) & set(booted.removed_packages)
        ),
    )
    if not after or not new.extensions_image or not (change.image or change.packages):
        return change
    # rpm-ostree resolves all layered packages again in each transaction, and needs their source.
    pullspec.parse_pull_spec(new.extensions_image, where="baseOSExtensionsContainerImage")
    return replace(change, extensions_image=new.extensions_image)


def count_machine_arguments(
    old: wanted_state.WantedOS, new: wanted_state.WantedOS, booted: DeploymentState
) -> dict[str, int]:
    """Return how often the machine itself has each kernel argument of the two configs."""
    return deployment_change.count_machine_arguments(
        old.kernel_arguments,
        new.kernel_arguments,
        booted.kernel_arguments,
        booted.machine_arguments,
    )


def describe_kept_arguments(
    old: wanted_state.WantedOS, new: wanted_state.WantedOS, booted: DeploymentState
) -> tuple[str, ...]:
    """Return a sentence for each kernel argument that leaves the config and not the machine."""
    from treenail.config.redact import redact_line  # noqa: PLC0415 - slow import, rarely needed

    counts = count_machine_arguments(old, new, booted)
    kept = deployment_change.list_kept(counts, new.kernel_arguments)
    return tuple(
        f"keeping the kernel argument {argument}: the machine may have had it before the config; "
        f"if it did not, remove it: rpm-ostree kargs --delete={argument}"
        for argument in map(redact_line, kept)
    )


def check_kernel_type(os: wanted_state.WantedOS, architecture: str) -> None:
    """Raise `UnreconcilableError` for a kernel type that the architecture, by OCI name, lacks."""
    allowed = machineconfig.KERNEL_ARCHITECTURES.get(os.kernel_type, architecture)
    if architecture != allowed:
        raise errors.UnreconcilableError(
            f"cannot use kernelType {os.kernel_type}: it exists for {allowed} only, and this "
            f"machine is {architecture}",
            remedy="use kernelType default in the MachineConfigs of this pool, or move the node to "
            "a pool without it",
        )


def is_in_effect(change: deployment_change.DeploymentChange, booted: DeploymentState) -> bool:
    """Return whether the change is booted."""
    return (
        (not change.image or booted.has_booted(change.digest))
        and deployment_change.is_applied(booted.kernel_arguments, change)
        and set(change.install_packages) <= set(booted.packages)
        and not set(change.uninstall_packages) & set(booted.packages)
        and set(change.override_remove) <= set(booted.removed_packages)
        and not set(change.override_reset) & set(booted.removed_packages)
    )


def _select_image(image: str, booted: DeploymentState) -> str:
    if not image or booted.has_booted(image.partition("@")[2]):
        return ""
    pullspec.parse_pull_spec(image, where="osImageURL")
    return image


def _list_removed_packages(os: wanted_state.WantedOS) -> frozenset[str]:
    return (
        frozenset()
        if os.kernel_type == machineconfig.DEFAULT_KERNEL
        else machineconfig.STOCK_KERNEL_PACKAGES
    )


def _sort_names(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
