"""Images really pulled: skopeo fetches, each layer becomes a commit, one merge commit the image.

What ostree-ext does, by programs that Debian has. The lab's images have no whiteouts.
"""

import hashlib
import json
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from treenail_lab.machine.container.pull import AUTH_FILES, PullResult, parse_pull_spec
from treenail_lab.machine.ostree.steps import (
    EmitSignal,
    OperationError,
    PauseWork,
    emit_message,
    emit_task_begin,
    emit_task_end,
)
from vmlab.guest.names import DIGEST_KEY, ETC_FILTER, image_ref, layer_ref
from vmlab.guest.programs import run
from vmlab.guest.realsysroot import RealSysroot

_OPENING = "Preparing import: Fetching manifest: failed to invoke method OpenImage: "
_SCRATCH = Path("/var/tmp")


class Pulling:
    """Pulls into the repository of one sysroot."""

    def __init__(self, sysroot: RealSysroot) -> None:
        self._sysroot = sysroot

    def pull(
        self, pulled: str, refspec: str, kernel_arguments: tuple[str, ...]
    ) -> Generator[EmitSignal | PauseWork, None, PullResult]:
        """Fetch what ``pulled`` names; layers that are here already are not fetched again."""
        pull_spec = parse_pull_spec(pulled)
        source = f"docker://{pull_spec}"
        login = _login()
        yield emit_message(f"Pulling manifest: {pulled}")
        raw = yield from run("skopeo", "inspect", "--raw", *login, source, failing=_OPENING)
        digest = f"sha256:{hashlib.sha256(raw.encode()).hexdigest()}"
        if not pull_spec.endswith(digest) and "@" in pull_spec:
            raise OperationError(f"{_OPENING}the manifest of {pull_spec} has digest {digest}")
        yield emit_message(f"Importing: {pulled} (digest: {digest})")
        layers = [str(layer["digest"]) for layer in json.loads(raw)["layers"]]
        ref = image_ref(pull_spec)
        if self._sysroot.metadata(ref, DIGEST_KEY) != digest:
            missing = [layer for layer in layers if not self._sysroot.has(layer_ref(layer))]
            if len(missing) < len(layers):
                yield emit_message(f"layers already present: {len(layers) - len(missing)}")
            yield from _fetch(source, login, layers, missing)
            yield from _merge(ref, layers, pull_spec, digest)
        return PullResult(self._sysroot.new(ref, refspec, digest, kernel_arguments))


def _login() -> list[str]:
    found = (Path("/") / name for name in AUTH_FILES)
    first = next((path for path in found if path.exists()), None)
    return ["--authfile", str(first)] if first else []


def _fetch(
    source: str, login: list[str], layers: list[str], missing: list[str]
) -> Generator[EmitSignal | PauseWork, None, None]:
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as scratch:
        blobs = Path(scratch) / "blobs/sha256"
        blobs.mkdir(parents=True)
        # skopeo leaves out what is there already, and does not look at what it holds.
        for layer in set(layers) - set(missing):
            (blobs / layer.removeprefix("sha256:")).touch()
        yield emit_task_begin(f"[1/{len(missing)}] Fetching {len(missing)} layers")
        yield from run(
            "skopeo", "--insecure-policy", "copy", "--quiet", *login,
            "--dest-shared-blob-dir", str(blobs.parent), source, f"oci:{scratch}/image:latest",
            failing="Importing: ",
        )  # fmt: skip
        yield emit_task_end()
        for number, layer in enumerate(missing, start=1):
            yield emit_task_begin(f"[{number}/{len(missing)}] Importing layer {layer[:19]}")
            yield from _commit(
                layer_ref(layer),
                f"tar={blobs / layer.removeprefix('sha256:')}",
                options=(ETC_FILTER,),
            )
            yield emit_task_end()


def _merge(
    ref: str, layers: list[str], pull_spec: str, digest: str
) -> Generator[EmitSignal | PauseWork, None, None]:
    yield emit_task_begin("Merging layers")
    yield from _commit(
        ref,
        *(f"ref={layer_ref(layer)}" for layer in layers),
        bootable=True,
        metadata={
            "version": digest.removeprefix("sha256:")[:12],
            DIGEST_KEY: digest,
            "ostree.container.image-reference": pull_spec,
        },
    )
    yield emit_task_end()


def _commit(
    ref: str,
    *trees: str,
    bootable: bool = False,
    metadata: dict[str, str] | None = None,
    options: Sequence[str] = (),
) -> Generator[EmitSignal | PauseWork, None, None]:
    options = [*options, *(f"--tree={tree}" for tree in trees)]
    options += [f"--add-metadata-string={key}={text}" for key, text in (metadata or {}).items()]
    if bootable:
        options.append("--bootable")
    yield from run(
        "ostree", "commit", "--repo=/ostree/repo", f"--branch={ref}", "--no-bindings",
        "--tar-autocreate-parents", "--fsync=true", *options, failing="Importing: ",
    )  # fmt: skip
