"""Topologies as JSON files: every figure with its source and its noise, and the machine that it was measured on."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import Endpoint
from conduit.topology.nvidia import gpus
from conduit.topology.presets import PRESETS, preset

FORMAT = "conduit topology"
VERSION = 1

PRESET = "preset"
"""The machine of what wasn't measured on any."""

_T = TypeVar("_T")


def save(topology: Topology, path: str | os.PathLike[str]) -> None:
    """The file is there whole, or what was there before still is. TopologyError with the operating system's words."""
    path = os.fspath(path)
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            with open(beside, "x", encoding="utf-8") as file:
                json.dump(encoded(topology), file, indent=1, ensure_ascii=False, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        raise TopologyError(f"{path}: can't write the topology: {error.strerror or error}") from error
    except ValueError as error:  # of a path, or a name in it, that can't be written down
        raise TopologyError(f"{path!r}: can't write the topology: {error}") from error


def load(path: str | os.PathLike[str]) -> Topology:
    """What `save` wrote, figure by figure. TopologyError says what is wrong with the file, and where. It may be of another machine:
    `check_machine`."""
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise TopologyError(f"{path}: can't read the topology: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of bytes that aren't UTF-8
        raise TopologyError(f"{path} is no topology: it isn't JSON ({error})") from error
    return decoded(value, path)


def named(given: str | os.PathLike[str]) -> Topology:
    """The preset of this name, or what the file at this path has. TopologyError where it is neither."""
    if not isinstance(given, str | os.PathLike):
        raise TopologyError(f"topology={given!r}: expected a conduit.topology.Topology, a preset's name, or a path")
    name = os.fspath(given)
    if name in PRESETS:
        return preset(name)
    try:
        return load(name)
    except TopologyError as error:
        raise TopologyError(f"topology={given!r} is no preset ({', '.join(PRESETS)}), and {error}") from error


def check_machine(topology: Topology, here: str | None = None) -> None:
    """TopologyError unless its figures are of this machine (`here`: of the one of this name)."""
    here = this_machine() if here is None else here
    if topology.machine == PRESET:
        raise TopologyError(
            f"topology {topology.name!r} is a preset, and this machine is {here!r}: measure it (conduit topology --measure), or emulate the preset"
        )
    if topology.machine != here:
        raise TopologyError(
            f"topology {topology.name!r} was measured on another machine, {topology.machine!r}; this is {here!r}: measure it here (conduit topology --measure)"
        )


def this_machine() -> str:
    """What tells machines apart: the host's name, its processor, and its NVIDIA GPUs where NVML can be asked."""
    kinds = Counter(gpu.name for gpu in gpus().found)
    return ", ".join(
        [socket.gethostname(), f"{os.cpu_count()} × {_processor()}", *(f"{kinds[name]} × {name}" for name in kinds)]
    )


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := re.match(r"model name\s*:\s*(.+)", line):
                return " ".join(match[1].split())
    return platform.processor() or platform.machine()


def encoded(topology: Topology) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": topology.name,
        "machine": topology.machine,
        "memories": [
            {
                "at": str(at),
                "what": memory.what,
                "capacity_bytes": int(memory.capacity_bytes),
                "free_bytes": int(memory.free_bytes),
                "source": memory.source.value,
            }
            for at, memory in topology.memories.items()
        ],
        "links": [
            {"name": name, "bytes_per_s": float(link.bytes_per_s), "source": link.source.value}
            for name, link in topology.links.items()
        ],
        "legs": [
            {
                "from": str(source),
                "to": str(to),
                "bytes_per_s": float(leg.bytes_per_s),
                "latency_s": float(leg.latency_s),
                "source": leg.source.value,
                "noise": float(leg.noise),
                "links": list(topology.route(source, to)),
            }
            for (source, to), leg in topology.legs.items()
        ],
    }


def decoded(value: object, where: str) -> Topology:
    """`where`: the file's name, for messages."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise TopologyError(f'{where} is no topology: expected an object with "format": "{FORMAT}"')
    whole = _Object(value, where)
    version = whole.take("version", int)
    if version != VERSION:
        whose = f"of a newer Conduit; this one reads up to {VERSION}" if version > VERSION else "none that there was"
        raise TopologyError(f"{where}: version {version} is {whose}")
    memories: dict[Endpoint, Memory] = {}
    links: dict[str, Link] = {}
    legs: dict[Edge, Leg] = {}
    routes: dict[Edge, tuple[str, ...]] = {}
    for each in whole.objects("memories"):
        memory = each.made(
            Memory,
            each.take("capacity_bytes", int),
            each.take("free_bytes", int),
            each.source(),
            each.take("what", str),
        )
        each.put(memories, each.endpoint("at"), memory)
    for each in whole.objects("links"):
        each.put(links, each.take("name", str), each.made(Link, each.take("bytes_per_s", float), each.source()))
    for each in whole.objects("legs"):
        figures = (each.take("bytes_per_s", float), each.take("latency_s", float), each.source())
        leg = each.made(Leg, *figures, each.take("noise", float))
        edge = each.endpoint("from"), each.endpoint("to")
        each.put(legs, edge, leg)
        if route := each.take("links", list):
            routes[edge] = tuple(map(str, route))
    name, machine = whole.take("name", str), whole.take("machine", str)
    return whole.made(Topology, name, memories, legs, links, routes, machine)


class _Object:
    """An object of the file, and where in it that is."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise TopologyError(f"{where}: expected an object, not {value!r}")
        self._value: Mapping[str, Any] = value
        self._where = where

    def take(self, key: str, kind: type[_T]) -> _T:
        if key not in self._value:
            raise TopologyError(f"{self._where} has no {key!r}")
        value = self._value[key]
        # A number may be a whole one, and true is none.
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise TopologyError(f"{self._where}: {key}={value!r}: expected {_KINDS[kind]}")
        return cast(_T, value)

    def objects(self, key: str) -> list[_Object]:
        return [_Object(each, f"{self._where}: {key}[{number}]") for number, each in enumerate(self.take(key, list))]

    def source(self) -> Source:
        value = self.take("source", str)
        try:
            return Source(value)
        except ValueError:
            expected = ", ".join(source.value for source in Source)
            raise TopologyError(f"{self._where}: source={value!r}: expected one of {expected}") from None

    def endpoint(self, key: str) -> Endpoint:
        try:
            return Endpoint.parse(self.take(key, str))
        except TopologyError:
            raise
        except ValueError as error:
            raise TopologyError(f"{self._where}: {key}: {error}") from None

    def made(self, kind: type[_T], *figures: Any) -> _T:
        """What is made of these; its own refusal says where they are."""
        try:
            return kind(*figures)
        except TopologyError as error:
            raise TopologyError(f"{self._where}: {error}") from None

    def put(self, into: dict[Any, Any], key: object, value: object) -> None:
        if key in into:
            raise TopologyError(f"{self._where} is there twice")
        into[key] = value


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", list: "a list"}
