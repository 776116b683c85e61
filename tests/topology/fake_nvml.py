"""A pretend `pynvml`: the calls that discovery makes, over GPUs that a test describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The real one's name."""


@dataclass
class Card:
    """One GPU. `links`: of each NVLink, its version and where it leads: a bus id, or None for a switch."""

    uuid: str
    bus: str
    name: str = "NVIDIA A100-SXM4-80GB"
    total: int = 80 << 30
    free: int = 79 << 30
    generation: int = 4
    width: int = 16
    bits: int = 5120
    megahertz: int = 1593
    node: int = 0
    mig: bool = False
    links: Sequence[tuple[int, str | None]] = field(default_factory=list)


def card_bus(index: int) -> str:
    """As NVML writes it."""
    return f"00000000:{index:02X}:00.0"


class FakeNvml:
    """Put into `sys.modules` as "pynvml". `fails`: which calls raise, by their number from 1; `levels`, `peers`: by two cards' places."""

    NVMLError = NVMLError
    NVML_FEATURE_ENABLED = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_CLOCK_MEM = 2
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_SYSTEM = 10, 20, 30, 50
    NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED = 0, 5
    NVML_P2P_CAPS_INDEX_READ = (0,)
    nvmlMemory_v2 = 33554472  # noqa: N815

    def __init__(
        self,
        cards: Sequence[Card],
        levels: Mapping[frozenset[int], int] | None = None,
        peers: bool = True,
        fails: Any = lambda call: False,
        no_driver: bool = False,
    ) -> None:
        self.cards, self.levels, self.peers, self.fails, self.no_driver = cards, levels or {}, peers, fails, no_driver
        self.calls = 0
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.no_driver:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        answer = getattr(_Answers, name.removeprefix("nvml"))

        def ask(*arguments: Any, **more: Any) -> Any:
            assert self.open, "asked before nvmlInit or after nvmlShutdown"
            self.calls += 1
            if self.fails(self.calls):
                raise NVMLError("Not Supported")
            return answer(self, *arguments, **more)

        return ask


class _Answers:
    """One a call, without its "nvml". A handle is a card's place."""

    DeviceGetCount = staticmethod(lambda n: len(n.cards))
    DeviceGetHandleByIndex = staticmethod(lambda n, index: index)
    DeviceGetUUID = staticmethod(lambda n, handle: n.cards[handle].uuid)
    DeviceGetName = staticmethod(lambda n, handle: n.cards[handle].name)
    DeviceGetPciInfo = staticmethod(lambda n, handle: SimpleNamespace(busId=n.cards[handle].bus.encode()))
    DeviceGetMigMode = staticmethod(lambda n, handle: [int(n.cards[handle].mig)] * 2)
    DeviceGetMaxPcieLinkGeneration = staticmethod(lambda n, handle: n.cards[handle].generation)
    DeviceGetMaxPcieLinkWidth = staticmethod(lambda n, handle: n.cards[handle].width)
    DeviceGetMemoryBusWidth = staticmethod(lambda n, handle: n.cards[handle].bits)
    DeviceGetMaxClockInfo = staticmethod(lambda n, handle, clock: n.cards[handle].megahertz)
    DeviceGetNumaNodeId = staticmethod(lambda n, handle: n.cards[handle].node)

    @staticmethod
    def DeviceGetMemoryInfo(n: FakeNvml, handle: int, version: int) -> Any:  # noqa: N802
        assert version == n.nvmlMemory_v2, "the first version counts reserved memory as used"
        return SimpleNamespace(total=n.cards[handle].total, free=n.cards[handle].free)

    @staticmethod
    def _link(n: FakeNvml, handle: int, link: int) -> tuple[int, str | None]:
        if link >= len(n.cards[handle].links):
            raise NVMLError("Invalid Argument")
        return n.cards[handle].links[link]

    @staticmethod
    def DeviceGetNvLinkState(n: FakeNvml, handle: int, link: int) -> int:  # noqa: N802
        _Answers._link(n, handle, link)
        return 1

    @staticmethod
    def DeviceGetNvLinkVersion(n: FakeNvml, handle: int, link: int) -> int:  # noqa: N802
        return _Answers._link(n, handle, link)[0]

    @staticmethod
    def DeviceGetNvLinkRemoteDeviceType(n: FakeNvml, handle: int, link: int) -> int:  # noqa: N802
        return 2 if _Answers._link(n, handle, link)[1] is None else 0

    @staticmethod
    def DeviceGetNvLinkRemotePciInfo(n: FakeNvml, handle: int, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=(_Answers._link(n, handle, link)[1] or "00000000:FF:00.0").encode())

    @staticmethod
    def DeviceGetTopologyCommonAncestor(n: FakeNvml, a: int, b: int) -> int:  # noqa: N802
        return n.levels.get(frozenset((a, b)), n.NVML_TOPOLOGY_SYSTEM)

    @staticmethod
    def DeviceGetP2PStatus(n: FakeNvml, a: int, b: int, index: int) -> int:  # noqa: N802
        assert index == 0, "the constant is a tuple"
        return n.NVML_P2P_STATUS_OK if n.peers else n.NVML_P2P_STATUS_NOT_SUPPORTED
