"""treenail pins Kubernetes nodes on OSTree-based operating systems to their configuration."""

__version__ = "0.1.0"
