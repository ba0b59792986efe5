"""Units with which ``openshift-install gather bootstrap`` includes the log bundle. Pure."""

from treenail.api.decode import Json

BOOTSTRAP_HOST_DIRECTORY = "/opt/openshift"
"""Install directory on a bootstrap host of the OpenShift installer."""
_IGNITION_VERSION = "3.2.0"
# installer-gather.sh of the installer makes _ARTIFACTS first, and packs all of it at its end.
_TEMPORARY = "/tmp"  # noqa: S108  the installer's directory
_ARTIFACTS = f"{_TEMPORARY}/artifacts-*"
_PATH_UNIT = f"""\
[Unit]
Description=Watch for openshift-install gather
Documentation=man:treenail-install(7)

[Path]
PathChanged={_TEMPORARY}
Unit=treenail-gather.service

[Install]
WantedBy=multi-user.target
"""
# The installer packs as the user who made the directory, so the files must belong to that user.
# The last command moves everything at once: the installer never packs a half-written part.
_SERVICE_UNIT = f"""\
[Unit]
Description=Add treenail to the log bundle of openshift-install gather
Documentation=man:treenail-install(7)
ConditionPathExistsGlob={_ARTIFACTS}
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'for each in {_ARTIFACTS}; do \\
  [ -d "$$each" ] && [ ! -L "$$each" ] && [ ! -e "$$each/bootstrap/treenail" ] || continue; \\
  rm -rf "$$each/.treenail"; mkdir -p "$$each/.treenail" "$$each/bootstrap"; \\
  treenail-controller install gather --dir {BOOTSTRAP_HOST_DIRECTORY} --output - | \\
    tar -xz --strip-components=1 -C "$$each/.treenail"; \\
  chown -R --reference="$$each" "$$each/.treenail" "$$each/bootstrap"; \\
  mv -T "$$each/.treenail/bootstrap/treenail" "$$each/bootstrap/treenail"; \\
  rm -rf "$$each/.treenail"; done'
"""


def build_gather_hook() -> Json:
    """Build an Ignition config with the units, for the config of the bootstrap host."""
    units = [
        {"name": "treenail-gather.path", "enabled": True, "contents": _PATH_UNIT},
        {"name": "treenail-gather.service", "contents": _SERVICE_UNIT},
    ]
    return {"ignition": {"version": _IGNITION_VERSION}, "systemd": {"units": units}}
