"""A network namespace for some processes of a test, joined to this one by a pair of virtual Ethernet devices.

Frames are lost without a word, in one direction or both: the sender's table of neighbours has a wrong address. The
namespace and its devices end with their holder, which ends with this process.
"""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from support.small_disk import held
from support.tcp_links import Direction

NOWHERE = "02:00:00:00:00:01"
SCRIPT = "echo held && exec sleep infinity"


class NetworkNamespace:
    def __init__(self, holder: int) -> None:
        self.enter = ["nsenter", "--target", str(holder), "--net", "--"]
        first, second = secrets.randbelow(256), 4 * secrets.randbelow(64)
        self._device = f"pk{secrets.token_hex(4)}"
        self.outside, self.inside = (f"10.{first}.77.{second + number}" for number in (1, 2))
        _ip("link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
        _ip("addr", "add", f"{self.outside}/30", "dev", self._device)
        _ip("link", "set", self._device, "up")
        self._ip_inside("addr", "add", f"{self.inside}/30", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip_inside("link", "set", device, "up")

    def cut(self, directions: Direction) -> None:
        """Cut these directions and repair the others."""
        if Direction.THERE & directions:
            self._ip_inside("neigh", "replace", self.outside, "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
        else:
            self._ip_inside("neigh", "flush", "dev", "eth0", "nud", "permanent")
        if Direction.BACK & directions:
            _ip("neigh", "replace", self.inside, "lladdr", NOWHERE, "nud", "permanent", "dev", self._device)
        else:
            _ip("neigh", "flush", "dev", self._device, "nud", "permanent")

    def _ip_inside(self, *arguments: str) -> None:
        subprocess.run([*self.enter, "ip", *arguments], check=True, capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def network_namespace() -> Iterator[NetworkNamespace | str]:
    """The namespace; or why there is none: this user may not have one, or `ip` is not installed."""
    holder = held(["unshare", "--net", "sh", "-c", SCRIPT], says=b"held\n")
    if holder is None:
        yield "unshare --net is not permitted"
        return
    try:
        try:
            namespace: NetworkNamespace | str = NetworkNamespace(holder.pid)
        except (OSError, subprocess.CalledProcessError) as error:
            namespace = f"{error}: {getattr(error, 'stderr', '')}"
        yield namespace
    finally:
        holder.kill()
        holder.wait()
