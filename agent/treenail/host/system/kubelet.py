"""The state of the kubelet that only its files show."""

from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root

# The kubelet keeps its new key here until its certificate is issued (tmpPrivateKeyFile in
# pkg/kubelet/certificate/bootstrap of Kubernetes), and removes it then.
_PENDING_KEY = "/var/lib/kubelet/pki/kubelet-client.key.tmp"


class KubeletFiles:
    """Reads files of the kubelet below a root."""

    def __init__(self, root: Root) -> None:
        self._files = HostFiles(root)

    def is_waiting_for_certificate(self) -> bool:
        """Return whether the kubelet requested a client certificate that is not yet issued.

        Raises `FileError`.
        """
        return self._files.has_entry(_PENDING_KEY)
