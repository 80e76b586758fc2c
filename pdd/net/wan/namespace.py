"""Network namespaces and TUN devices by system calls alone: no `ip`, no `tc`, nothing to install.

Invariant: namespaces have no name and no mount; each lives through an open file and the processes inside, so
the kernel removes it when they are gone, however they ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFDSTADDR = 0x8914, 0x8916, 0x8918
SIOCSIFMTU, SIOCSIFTXQLEN = 0x8922, 0x8943
IFF_UP, IFF_RUNNING = 0x1, 0x40
TX_PACKETS = 2000

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def new_namespace() -> int:
    """An open file of a fresh network namespace, with loopback up; the caller stays where it is."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNET)
        fresh = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _set_flags("lo")
    finally:
        _call("setns", home, CLONE_NEWNET)
        os.close(home)
    return fresh


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Run the block in the namespace; for a process with one thread."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", namespace, CLONE_NEWNET)
    try:
        yield
    finally:
        _call("setns", home, CLONE_NEWNET)
        os.close(home)


def open_tun(name: str, address: str, peer: str, mtu_bytes: int) -> int:
    """A TUN device of the present namespace from `address` to `peer`, up, with TCP offloads."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", 10))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    _interface(SIOCSIFMTU, name, struct.pack("i", mtu_bytes))
    _interface(SIOCSIFTXQLEN, name, struct.pack("i", TX_PACKETS))
    set_address(name, address)
    _interface(SIOCSIFDSTADDR, name, _sockaddr(peer))
    _set_flags(name)
    return fd


def set_address(name: str, address: str) -> None:
    """Give the interface of the present namespace an address."""
    _interface(SIOCSIFADDR, name, _sockaddr(address))


def set_kernel(key: str, value: str) -> None:
    """Write a network setting of the present namespace, e.g. "ipv4/tcp_ecn", where the kernel lets us."""
    try:
        with open(f"/proc/sys/net/{key}", "w") as setting:
            setting.write(value)
    except (FileNotFoundError, PermissionError):
        return


def _set_flags(name: str) -> None:
    _interface(SIOCSIFFLAGS, name, struct.pack("H", IFF_UP | IFF_RUNNING))


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _interface(request: int, name: str, value: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, request, struct.pack("16s24s", name.encode(), value))
