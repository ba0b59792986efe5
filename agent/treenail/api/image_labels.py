"""Labels of OS images that nodes and builds read."""

BOOTABLE_LABELS = ("ostree.bootable", "containers.bootc")
"""The labels that ostree looks for before it deploys an image; one of them is enough."""
