"""Which boot it is: a name that is another one after every boot, soft ones too.

A soft reboot starts user space anew on the kernel that runs, and with it stays the kernel's own
boot id; so the name is that id and, after the first soft reboot, how many there were: ``UUID+1``.
"""

_SOFT = "+"


def extract_kernel_boot_id(boot_id: str) -> str:
    """The boot id of the kernel, which is what the kubelet reports."""
    return boot_id.partition(_SOFT)[0]


def is_soft_boot(boot_id: str) -> bool:
    """Whether user space was started without the kernel."""
    return _SOFT in boot_id


def is_soft_reboot(before: str, after: str) -> bool:
    """Whether the one boot came of the other by soft reboots alone."""
    return before != after and extract_kernel_boot_id(before) == extract_kernel_boot_id(after)
