"""Commands of bootc and their results, for the lab's program and for the real one.

A class of tests derives from `BootcProgramContract`, and has the fixture ``host``.
"""

import json
import subprocess
from typing import Any, Protocol

import pytest

Json = dict[str, Any]

MISSING = "sha256:" + "0" * 64
PREPARING = "Switching: Switching (ostree): Preparing import: Fetching manifest: "
OPENING = f"{PREPARING}failed to invoke method OpenImage: "
STORAGE = "overlay@/var/lib/containers/storage+/run/containers/storage"
INSECURE = "containers-policy.json specifies a default of `insecureAcceptAnything`"
SAVE_PROGRESS = "d=$(mktemp -d); mkfifo $d/p; cat $d/p >$d/events & {} 3>$d/p; wait; cat $d/events"
ENTRY_KEYS = {
    "cachedUpdate", "composefs", "downloadOnly", "image", "incompatible", "ostree", "pinned",
    "softRebootCapable", "store",
}  # fmt: skip
STATUS_KEYS = {
    "booted", "readOnly", "rollback", "rollbackQueued", "staged", "type", "usrOverlay",
}  # fmt: skip


class BootcHost(Protocol):
    """A host that was just installed, with bootc in its PATH."""

    here: str
    """The pull spec of the booted image."""
    there: str
    """That of another image, with one layer that the host does not have."""

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the shell as root."""

    def path(self, path: str) -> str:
        """Return where the script finds a file of the host."""


def read_document(host: BootcHost) -> Json:
    """Return what ``bootc status`` prints."""
    return json.loads(host.sh("bootc status --json --format-version=1").stdout)


def digest(pull_spec: str) -> str:
    return pull_spec.partition("@")[2]


class BootcProgramContract:
    """Exit codes, texts, status and progress that the agent reads."""

    def test_status_is_canonical_json(self, host: BootcHost) -> None:
        shown = host.sh("bootc status --json --format-version=1")
        found = json.loads(shown.stdout)
        assert shown.stdout == json.dumps(found, sort_keys=True, separators=(",", ":"))
        image = {"image": host.here, "transport": "registry"}
        assert found["spec"] == {"bootOrder": "default", "image": image}
        status = found["status"]
        assert status.keys() == STATUS_KEYS
        assert (status["type"], status["staged"], status["rollback"]) == ("bootcHost", None, None)
        booted = status["booted"]
        assert booted.keys() == ENTRY_KEYS
        assert booted["image"].keys() == {
            "architecture", "image", "imageDigest", "timestamp", "version",
        }  # fmt: skip
        assert (booted["image"]["image"], booted["image"]["imageDigest"]) == (
            image,
            digest(host.here),
        )
        assert booted["ostree"].keys() == {"checksum", "deploySerial", "stateroot"}

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            ("status --json --format-version=2", 1,
             "error: Status: Unsupported format version: 2"),
            ("switch {name}@" + MISSING, 1,
             f"error: {OPENING}reading manifest {MISSING} in {{name}}: manifest unknown"),
            ("switch --transport containers-storage {there}", 1,
             f'error: {OPENING}reference "[{STORAGE}]{{there}}" does not resolve to an image ID'),
            ("switch --enforce-container-sigpolicy {there}", 1,
             f"error: {PREPARING}{INSECURE}; refusing usage"),
            ("switch --progress-fd 1 {there}", 2, "Cannot use fd 1 for progress JSON"),
            ("switch --progress-fd 3 {there} 3>/dev/null", 1,
             "error: Switching: Switching (ostree): not a pipe"),
            ("switch", 2, "bootc switch"),
            ("reboot", 2, "bootc"),
            ("rollback", 1, "error: Rollback: Rollback (ostree): No rollback available"),
        ],
    )  # fmt: skip
    def test_refused_command_has_code_and_message(
        self, host: BootcHost, arguments: str, code: int, message: str
    ) -> None:
        names = {"name": host.there.partition("@")[0], "there": host.there}
        ended = host.sh(f"bootc {arguments.format(**names)}")
        assert (ended.returncode, message.format(**names) in ended.stderr) == (code, True), ended
        assert read_document(host)["status"]["staged"] is None

    def test_switch_to_booted_image_changes_nothing(self, host: BootcHost) -> None:
        ended = host.sh(f"bootc switch {host.here}")
        assert (ended.returncode, ended.stdout) == (0, "Image specification is unchanged.\n")

    def test_switch_stages_and_requests_a_reboot(self, host: BootcHost) -> None:
        ended = host.sh(f"bootc switch --quiet {host.there}")
        assert ended.returncode == 0
        assert "Deploying...done (" in ended.stderr
        version, wanted = read_document(host)["status"]["staged"]["image"]["version"], host.there
        assert ended.stdout.endswith(
            f"Queued for next boot: {wanted}\n  Version: {version}\n  Digest: {digest(wanted)}\n"
        )
        document = read_document(host)
        staged = document["status"]["staged"]
        assert document["spec"]["image"] == {"image": wanted, "transport": "registry"}
        assert (staged["image"]["imageDigest"], staged["downloadOnly"]) == (digest(wanted), False)
        request = host.sh(f"cat {host.path('/run/reboot-required')}").stdout
        assert request == f"bootc: Reboot required for image: {digest(wanted)}"

    def test_switch_writes_progress(self, host: BootcHost) -> None:
        command = f"bootc switch --quiet --progress-fd 3 {host.there} >/dev/null"
        lines = host.sh(SAVE_PROGRESS.format(command)).stdout.splitlines()
        start, *events = [json.loads(line) for line in lines]
        assert start == {"type": "Start", "version": "0.1.0"}
        assert {each["id"] for each in events} == {digest(host.there)}
        pulled = [each for each in events if each["type"] == "ProgressBytes"]
        last = pulled[-1]
        assert (last["task"], last["steps"], last["stepsTotal"]) == ("pulling", 1, 1)
        assert last["description"] == f"Pulling Image: {digest(host.there)}"
        assert last["subtasks"][-1]["bytes"] == last["subtasks"][-1]["bytesTotal"]
        steps = [
            (each["task"], each["steps"], each["stepsTotal"], each["description"])
            for each in events
            if each["type"] == "ProgressSteps"
        ]
        assert steps == [
            ("importing", 0, 1, "Importing Image"),
            ("importing", 1, 1, "Importing Image"),
            ("staging", 0, 3, "Deploying Image"),
            ("staging", 1, 3, "Deploying Image"),
            ("staging", 1, 3, "Deploying Image"),
            ("staging", 2, 3, "Deploying Image"),
            ("staging", 3, 3, "Deploying Image"),
        ]
