"""Verification of a new machine before it joins: it has the config that its annotations claim."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from treenail import errors
from treenail.api import decode, machineconfig
from treenail.config import drift_comparison, image_content, node_paths, wanted_state
from treenail.daemon.configuration import mcd_state, node_configuration
from treenail.daemon.configuration.drift import BootedState, DriftCheck, ExpectedState
from treenail.daemon.configuration.image_content import DeploymentImages
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.update.drift import drift_policy, drift_repair
from treenail.update.firstboot import FirstBootClaim, make_contradiction_error, read_claim

log = logging.getLogger(__name__)

_LIMIT = 64 * 1024 * 1024
_WRITE = "write"


class FirstBootVerifier:
    """Compares the machine with the rendered config that it was served.

    All methods raise `HostError`, and `ConfigError` for a file of the provisioning that is invalid.
    """

    def __init__(
        self,
        files: HostFiles,
        images: DeploymentImages,
        configuration: node_configuration.NodeConfiguration,
        check: DriftCheck,
        *,
        policy: drift_policy.DriftPolicy,
        has_files_in_image: bool,
    ) -> None:
        """``has_files_in_image``: in image mode the image must contain the config's files."""
        self._files = files
        self._images = images
        self._configuration = configuration
        self._check = check
        self._policy = policy
        self._has_files_in_image = has_files_in_image

    def read_claim(self) -> FirstBootClaim:
        """Read what the annotations file claims that the machine has."""
        return read_claim(mcd_state.read_first_boot_annotations(self._files) or {})

    def check_staged_image(self, claim: FirstBootClaim, staged_id: str) -> None:
        """Raise `ConfigError` unless the staged image contains the config's files.

        Only in image mode, and unless the agent may write these files.
        """
        wanted = self._read_served(claim)
        if wanted is None or not claim.image or not self._must_have_files(claim):
            return
        split = image_content.compare_with_image(
            wanted, self._images.read_staged(staged_id, wanted)
        )
        if split.missing:
            raise image_content.make_missing_error(claim.config, claim.image, split.missing)

    def verify_machine(self, claim: FirstBootClaim) -> None:
        """Verify files and units of the booted machine, and write those that differ.

        In image mode the image must contain what an image can carry, as in `check_staged_image`.
        Raises `ConfigError` if it does not, and `FileError` if something still differs.
        """
        wanted = self._read_served(claim)
        if wanted is None:
            return
        split = image_content.ImageSplit(wanted)
        if claim.image:
            split = image_content.compare_with_image(wanted, self._images.read_booted(wanted))
            if split.missing and self._must_have_files(claim):
                raise image_content.make_missing_error(claim.config, claim.image, split.missing)
        self._configuration.recover_interrupted("")
        self._repair_drift(split, claim.config)
        # Ignition wrote these files. Own them, so that a later config that drops them removes them.
        owned = image_content.drop_provided(split.wanted, split.provided)
        self._configuration.record_ownership(owned, claim.config)

    def remove_ignition_files(self) -> None:
        """Remove user data and config that Ignition left, with the access token in them.

        A file that cannot be removed is logged: /boot may be read-only.
        """
        for path in node_paths.IGNITION_FILES:
            try:
                if self._files.remove_file(path):
                    log.info("removed %s, which contains the user data of the machine", path)
            except errors.FileError as error:
                log.warning(
                    "%s; it may contain an access token; if treenail-firstboot.service cannot "
                    "remove it either, remove it: rm %s",
                    error,
                    path,
                )

    def _must_have_files(self, claim: FirstBootClaim) -> bool:
        return claim.image_files != _WRITE if claim.image_files else self._has_files_in_image

    def _read_served(self, claim: FirstBootClaim) -> wanted_state.WantedState | None:
        """Return the files and units of the served config; None without one."""
        content = self._files.read_file(node_paths.SERVED_CONFIG, limit=_LIMIT)
        if content is None or not claim.config:
            if claim.config:
                log.info("not verifying the files of %s: it was not served", claim.config)
            elif content is not None:
                # The server serves both. Ignition failed, or a user removed one.
                log.warning(
                    "not verifying the files of %s: %s is missing or names no config; read the "
                    "cause with: journalctl -t ignition",
                    *(node_paths.SERVED_CONFIG, node_paths.FIRST_BOOT_ANNOTATIONS),
                )
            return None
        config = machineconfig.MachineConfig.from_json(
            decode.load_json(content, where=node_paths.SERVED_CONFIG)
        )
        if config.name != claim.config:
            raise make_contradiction_error(
                f"{node_paths.SERVED_CONFIG} is {config.name}, and "
                f"{node_paths.FIRST_BOOT_ANNOTATIONS} names {claim.config}"
            )
        # The operating system was verified before, against the deployments.
        return replace(wanted_state.read_wanted_state(config), os=wanted_state.WantedOS())

    def _repair_drift(self, split: image_content.ImageSplit, config: str) -> None:
        drifts = self._find_drift(split.wanted)
        if not drifts:
            return
        log.warning(
            "writing what Ignition or the image left out: %s",
            drift_policy.format_drift(drifts, config),
        )
        planned = self._configuration.plan_steps(split.wanted, config, split.provided)
        self._configuration.apply_repair(drift_repair.plan_repair(planned.steps, drifts))
        remaining = self._find_drift(split.wanted)
        if remaining:
            raise errors.HostError(
                f"cannot verify the first boot: {drift_policy.format_drift(remaining, config)}",
                remedy="read the cause with: journalctl -t ignition; then install the machine "
                "again, or fix what differs",
            )

    def _find_drift(self, wanted: wanted_state.WantedState) -> tuple[drift_comparison.Drift, ...]:
        by_subject = self._check.check_everything(ExpectedState.from_wanted(wanted), BootedState())
        drifts = (drift for listed in by_subject.values() for drift in listed)
        return tuple(_drop_ignored(drifts, self._policy))


def _drop_ignored(
    drifts: Iterable[drift_comparison.Drift], policy: drift_policy.DriftPolicy
) -> Iterable[drift_comparison.Drift]:
    """Yield the drift that the agent would not just report when the machine has joined."""
    for drift in drifts:
        # The config server gives each machine its own kubeconfig, and the newest CAs.
        is_served = drift.subject == node_paths.KUBECONFIG or drift.subject.startswith(
            f"{node_paths.REGISTRY_CAS}/"
        )
        if not is_served and policy.choose_reaction(drift) is not drift_policy.DriftReaction.REPORT:
            yield drift
