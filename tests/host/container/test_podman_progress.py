"""Progress of a pull, parsed from podman's output."""

from treenail.host.container.podman import PodmanProgress
from treenail.host.ostree.deployments import TransactionProgress

IMAGE = "registry.example.com/os/node@sha256:" + "a" * 64
LAYERS = {f"sha256:{number:064x}": 100 for number in range(10)}
HEAD = f"Trying to pull {IMAGE}...\nGetting image source signatures\n"


def begun(count: int) -> str:
    return HEAD + "".join(f"Copying blob {digest}\n" for digest in list(LAYERS)[:count])


def test_progress_counts_layers_before_the_parallel_ones() -> None:
    progress = PodmanProgress(LAYERS)
    seen = [progress.parse_output(text) for text in (HEAD, begun(6), begun(8), begun(10))]
    assert seen == [
        TransactionProgress("pulling the image", 0),
        TransactionProgress("pulling layer 6 of 10", 0),
        TransactionProgress("pulling layer 8 of 10", 20),
        TransactionProgress("pulling layer 10 of 10", 40),
    ]


def test_progress_after_all_layers_is_99_percent() -> None:
    progress = PodmanProgress(LAYERS)
    output = begun(10) + "Copying config sha256:" + "b" * 64 + "\n"
    assert progress.parse_output(output).percent == 99


def test_progress_uses_bytes_that_podman_prints() -> None:
    sizes = dict.fromkeys(LAYERS, 100 * 2**20)
    progress = PodmanProgress(sizes)
    output = begun(6) + "Progress: 20.0MiB / 600.0MiB\nProgress: 0.5GiB / 0.6GiB\n"
    assert progress.parse_output(output).percent == 51
    assert progress.parse_output(begun(6)).percent == 51, "the percentage fell"


def test_progress_without_layer_sizes_has_no_percent() -> None:
    progress = PodmanProgress({})
    assert progress.parse_output(begun(3)) == TransactionProgress("pulling layer 3", None)


def test_progress_counts_repeated_layer_once() -> None:
    progress = PodmanProgress(LAYERS)
    assert progress.parse_output(begun(8) + begun(8)).percent == 20
