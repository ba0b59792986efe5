"""An emulated ``skopeo inspect``, which queries the lab's registry.

    python -m treenail_lab.machine.container.skopeo ROOT IMAGES inspect [OPTION…] docker://PULL-SPEC

Output, exit code and error messages are those of skopeo.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from treenail_lab import images
from treenail_lab.images import Image
from treenail_lab.lifetime.fork_server import build_client_script
from treenail_lab.machine.container.pull import open_image, open_remote
from treenail_lab.machine.ostree.steps import OperationError

_TRANSPORT = "docker://"


def install_skopeo(directory: Path, root: Path, catalogue: Path) -> Path:
    """Install the command into a directory of commands; return the directory."""
    commands = directory / "bin"
    commands.mkdir(exist_ok=True)
    command = commands / "skopeo"
    script = build_client_script("treenail_lab.machine.container.skopeo", root, catalogue)
    command.write_text(script, encoding="utf-8")
    command.chmod(0o755)
    return commands


def main(arguments: list[str]) -> int:
    """Print the image in the registry."""
    root, catalogue, verb, *options, reference = arguments
    if verb != "inspect" or not reference.startswith(_TRANSPORT):
        return _print_failure(f"cannot run skopeo {verb} {reference}: not emulated")
    try:
        known_images = images.load_catalogue(Path(catalogue))
        pull_spec = reference.removeprefix(_TRANSPORT)
        if known_images.is_in_registry(pull_spec) and "--raw" in options:
            remote = open_remote(pull_spec, Path(root))
            print(remote.read_manifest().decode(), end="")
            return 0
        listed = known_images.find_listed(pull_spec) if "--raw" in options else ()
        if listed:
            print(images.render_manifest_list(listed), end="")
            return 0
        image = open_image(pull_spec, known_images, Path(root))
    except OperationError as error:
        return _print_failure(f'Error parsing image name \\"{reference}\\": {error}')
    if failure := image.faults.get("inspect"):
        return _print_failure(failure)
    if "--raw" in options:
        print(image.render_manifest(), end="")
        return 0
    print(json.dumps(_build_document(image)))
    return 0


def _build_document(image: Image) -> dict[str, object]:
    configuration = json.loads(image.render_configuration())
    return {
        "Name": f"{image.registry}/{image.repository}",
        "Digest": image.digest,
        "Created": datetime.fromtimestamp(image.timestamp, UTC).isoformat(),
        "Labels": configuration["config"]["Labels"],
        "Architecture": image.architecture,
        "Os": "linux",
        "Layers": [layer.digest for layer in image.layers],
        "LayersData": [
            {"Digest": layer.digest, "Size": layer.size_bytes} for layer in image.layers
        ],
    }


def _print_failure(text: str) -> int:
    print(f'time="2026-01-01T00:00:00Z" level=fatal msg="{text}"', file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
