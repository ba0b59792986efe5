"""The boot ID: a text that changes with every boot, soft reboots included.

A soft reboot restarts user space on the running kernel, so the kernel's own boot ID stays. The boot
ID is therefore the kernel's, with the number of soft reboots since after the first: ``UUID+1``.
"""

_SOFT = "+"


def extract_kernel_boot_id(boot_id: str) -> str:
    """Return the kernel's boot ID, which is what the kubelet reports."""
    return boot_id.partition(_SOFT)[0]


def is_soft_boot(boot_id: str) -> bool:
    """Return whether the boot was a soft reboot."""
    return _SOFT in boot_id


def has_same_kernel(before: str, after: str) -> bool:
    """Return whether both boots ran on one kernel, whose monotonic clock goes on."""
    return extract_kernel_boot_id(before) == extract_kernel_boot_id(after)


def is_soft_reboot(before: str, after: str) -> bool:
    """Return whether only soft reboots lie between the two boots."""
    return before != after and has_same_kernel(before, after)
